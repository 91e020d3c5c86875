"""Bulyan: Krum chooses, then every number is trimmed by itself (El Mhamdi et al., 2018, arXiv 1802.07927)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from training.config.shape import Misfit
from training.federated.aggregation._robust import blocks, but, distances, misfits, need

if TYPE_CHECKING:
    from torch import Tensor

    from training.federation.config import FederationConfig


def combine(
    rows: Tensor,
    weights: Tensor,
    *,
    f: Annotated[int, "0..25000", "Bad clients among those of a round that it shall bear."] = 1,
) -> tuple[Tensor, Sequence[int]]:
    """Of n updates Krum takes n - 2f, one after the other; of each of their numbers the n - 4f nearest to the median
    are averaged. Each counts one, whatever it says of its samples."""
    import torch

    clients = len(rows)
    need(rows, 4 * f + 3)
    chosen = sorted(_chosen(distances(rows), f, clients - 2 * f))
    combined = torch.empty(rows.shape[1], dtype=torch.float64, device=rows.device)
    for part, block in blocks(rows[chosen]):
        combined[part] = _near_median(block, clients - 4 * f)
    return combined, but(chosen, clients)


def check(config: FederationConfig) -> Iterator[Misfit]:
    f = int(config.options_of("bulyan")["f"] or 0)
    yield from misfits(config, "bulyan.f", f, each=4, more=3)


def _chosen(apart: Tensor, f: int, many: int) -> list[int]:
    """Whom Krum would take, then of all others whom it would take, and so on.

    Neighbours are sorted once, and who is taken is struck from each list: with 1,000 clients 4 s instead of 20.
    """
    import torch

    ordered, neighbours = apart.sort(dim=1, stable=True)
    left = torch.arange(len(apart), device=apart.device)
    found: list[int] = []
    while len(found) < many:
        others = len(left) - 1
        nearest = min(others, max(1, others - f - 1))
        # Its own distance, 0, is the first.
        place = int(ordered[:, : nearest + 1].sum(dim=1).argmin())
        found.append(int(left[place]))
        stays = torch.arange(len(left), device=apart.device) != place
        left, ordered, neighbours = left[stays], ordered[stays], neighbours[stays]
        after = (neighbours == found[-1]).cumsum(dim=1, dtype=torch.int8)[:, :-1].bool()
        ordered = torch.where(after, ordered[:, 1:], ordered[:, :-1])
        neighbours = torch.where(after, neighbours[:, 1:], neighbours[:, :-1])
    return found


def _near_median(block: Tensor, many: int) -> Tensor:
    """(numbers,): the mean of those nearest to the median, of each column. Sorted, they lie side by side."""
    ordered = block.sort(dim=0).values
    middle = (ordered[(len(block) - 1) // 2] + ordered[len(block) // 2]) / 2
    runs = ordered.unfold(0, many, 1)
    # The best run is the one whose farther end is nearest.
    reach = (runs[..., -1] - middle).abs().maximum((runs[..., 0] - middle).abs())
    best = reach.argmin(dim=0)
    return runs.gather(0, best[None, :, None].expand(1, -1, many))[0].mean(dim=-1)
