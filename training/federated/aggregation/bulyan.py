"""Bulyan: a trimmed mean of the updates that Krum selects (El Mhamdi et al., 2018, arXiv 1802.07927)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from training.config.shape import Misfit
from training.federated.aggregation._robust import blocks, complement, distances, require_updates, too_few_updates

if TYPE_CHECKING:
    from torch import Tensor

    from training.federation.config import FederationConfig


def combine(
    rows: Tensor,
    weights: Tensor,
    *,
    f: Annotated[int, "0..25000", "Number of malicious clients in a round that it tolerates."] = 1,
) -> tuple[Tensor, Sequence[int]]:
    """Select n - 2f of n updates by repeated Krum, and average the n - 4f values nearest to each coordinate's median.

    Clients have equal weight, whatever number of samples they report.
    """
    import torch

    clients = len(rows)
    require_updates(rows, 4 * f + 3)
    chosen = sorted(_chosen(distances(rows), f, clients - 2 * f))
    combined = torch.empty(rows.shape[1], dtype=torch.float64, device=rows.device)
    for part, block in blocks(rows[chosen]):
        combined[part] = _near_median(block, clients - 4 * f)
    return combined, complement(chosen, clients)


def check(config: FederationConfig) -> Iterator[Misfit]:
    f = int(config.options_of("bulyan")["f"] or 0)
    yield from too_few_updates(config, "bulyan.f", f, each=4, more=3)


def _chosen(distances_between: Tensor, f: int, many: int) -> list[int]:
    """Return the clients that Krum selects one after the other, each from the remaining ones.

    Neighbours are sorted once, and a selected client is removed from each list: with 1,000 clients 4 s instead of 20.
    """
    import torch

    ordered, neighbours = distances_between.sort(dim=1, stable=True)
    left = torch.arange(len(distances_between), device=distances_between.device)
    found: list[int] = []
    while len(found) < many:
        others = len(left) - 1
        nearest = min(others, max(1, others - f - 1))
        # The first is the distance to itself, 0.
        place = int(ordered[:, : nearest + 1].sum(dim=1).argmin())
        found.append(int(left[place]))
        stays = torch.arange(len(left), device=distances_between.device) != place
        left, ordered, neighbours = left[stays], ordered[stays], neighbours[stays]
        after = (neighbours == found[-1]).cumsum(dim=1, dtype=torch.int8)[:, :-1].bool()
        ordered = torch.where(after, ordered[:, 1:], ordered[:, :-1])
        neighbours = torch.where(after, neighbours[:, 1:], neighbours[:, :-1])
    return found


def _near_median(block: Tensor, many: int) -> Tensor:
    """Return the mean of the values nearest to the median of each column, (parameters,). Sorted, they are adjacent."""
    ordered = block.sort(dim=0).values
    middle = (ordered[(len(block) - 1) // 2] + ordered[len(block) // 2]) / 2
    runs = ordered.unfold(0, many, 1)
    # The best run of adjacent values is the one whose farther end is nearest.
    reach = (runs[..., -1] - middle).abs().maximum((runs[..., 0] - middle).abs())
    best = reach.argmin(dim=0)
    return runs.gather(0, best[None, :, None].expand(1, -1, many))[0].mean(dim=-1)
