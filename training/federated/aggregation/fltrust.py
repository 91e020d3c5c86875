"""FLTrust: updates count by how they agree with one of the server's own (Cao et al., 2021, arXiv 2012.13995).

The server trains on rows of its own as a client would. They are taken, once and for all by the seed, from what is kept
for validation, and no longer judged by: else the score would be of rows that the model was steered with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from training.federated.aggregation._robust import blocks
from training.federated.aggregation.norm_clipping import norms
from training.federation.parts import TooFew

if TYPE_CHECKING:
    from torch import Tensor

TRUSTED = True


def combine(
    rows: Tensor,
    weights: Tensor,
    trusted: Tensor,
    *,
    root_samples: Annotated[int, "1..1000000", "Rows kept for validation that the server trains on instead."] = 100,
) -> tuple[Tensor, Sequence[int]]:
    """Each as long as the trusted one, by the cosine of their angle; what points away is left out."""
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
        raise TooFew("no update points where the server's own does")
    total = sums.zeros(rows.shape[1], rows.device)
    sums.add_weighted(total, rows, torch.where(scores > 0, scores * length / lengths, 0.0))
    return total / scores.sum(), (scores == 0).nonzero().flatten().tolist()
