"""FLTrust: updates are weighted by their agreement with the server's own (Cao et al., 2021, arXiv 2012.13995).

The server trains as a client would, on samples that the seed takes from the validation data. These are not used for
evaluation any more: otherwise scores would include samples that steered the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from training.federated.aggregation._robust import blocks
from training.federated.aggregation.norm_clipping import norms
from training.federation.parts import TooFewUpdates

if TYPE_CHECKING:
    from torch import Tensor

TRUSTED = True


def combine(
    rows: Tensor,
    weights: Tensor,
    trusted: Tensor,
    *,
    root_samples: Annotated[int, "1..1000000", "Validation samples that the server trains on instead."] = 100,
) -> tuple[Tensor, Sequence[int]]:
    """Return the mean of the updates, weighted by how well each agrees with the server's own update.

    Updates are scaled to the length of the server's. The weight is the cosine of the angle between the two; updates
    with a negative cosine are rejected.
    """
    import torch

    from training.federated import sums

    (length,) = norms(trusted[None])
    lengths = norms(rows)
    products = sum(
        (block @ trusted[part].double() for part, block in blocks(rows)), start=rows.new_zeros(len(rows)).double()
    )
    cosines = torch.where(lengths > 0, products / (lengths * length), 0.0)
    scores = cosines.nan_to_num(nan=0.0).clamp(min=0)
    if not scores.any():
        raise TooFewUpdates("no update points where the server's own does")
    total = sums.zeros(rows.shape[1], rows.device)
    sums.add_weighted(total, rows, torch.where(scores > 0, scores * length / lengths, 0.0))
    return total / scores.sum(), (scores == 0).nonzero().flatten().tolist()
