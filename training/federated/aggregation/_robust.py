"""Share what robust aggregations need: minimum numbers of updates, distances between them, and trimmed means."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from training.config.shape import Misfit
from training.federation.parts import TooFewUpdates

if TYPE_CHECKING:
    from torch import Tensor

    from training.federation.config import FederationConfig

BLOCK = 2**18
"""Values of all clients together that are converted to float64 at a time."""


def require_updates(rows: Tensor, least: int) -> None:
    """Raise TooFewUpdates if there are fewer than `least` rows."""
    if len(rows) < least:
        raise TooFewUpdates(f"{len(rows)} updates are left, at least {least} are needed")


def expected_updates(config: FederationConfig) -> int:
    """Return how many updates a round has at least: those of all selected clients, or the quorum of a deadline."""
    quorum = config.options_of("deadline").get("quorum") if config.pace == "deadline" else None
    return config.selected if quorum is None else math.ceil(float(quorum) * config.selected)


def too_few_updates(config: FederationConfig, option: str, value: int, *, each: int, more: int) -> Iterator[Misfit]:
    """Yield a misfit if a round has fewer than each · value + more updates, with the nearest setting that works.

    `option` is the option with the number of bad clients to tolerate, and `value` its value.
    """
    updates = expected_updates(config)
    if updates >= each * value + more:
        return
    if updates < more:
        text = f'"{config.aggregation}" needs at least {more} updates a round, and {updates} are expected.'
        yield Misfit(_size(config), f"{text} Write {_enough(config, more)}.")
        return
    most = (updates - more) // each
    yield Misfit(
        option,
        f"is {value}, for which {each * value + more} updates a round are needed, and {updates} are expected. "
        f"Write {most}{' or less' if most else ''}, or {_enough(config, each * value + more)}.",
    )


def _size(config: FederationConfig) -> str:
    return "clients" if config.per_round is None else "per_round"


def _enough(config: FederationConfig, updates: int) -> str:
    if updates <= config.selected:  # only the deadline's quorum leaves too few
        return f"quorum = {math.ceil(100 * updates / config.selected) / 100:g} in [run.deadline]"
    return f"{_size(config)} = {updates}"


def blocks(rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield blocks of columns (clients, width) in float64, each with its slice."""
    clients, size = rows.shape
    width = max(1, BLOCK // max(1, clients))
    for begin in range(0, size, width):
        part = slice(begin, min(begin + width, size))
        yield part, rows[:, part].double()


def distances(rows: Tensor) -> Tensor:
    """Return the squared distances between all rows, (clients, clients) float64. Nothing larger is allocated."""
    import torch

    clients = len(rows)
    products = torch.zeros(clients, clients, dtype=torch.float64, device=rows.device)
    for _, block in blocks(rows):
        # Subtract what all rows have in common, which would cost precision: the median, because a single bad update
        # can move a mean anywhere.
        centred = block - block.median(dim=0).values
        products += centred @ centred.T
    # BLAS computes the two halves in different orders: otherwise a pair would have two distances, and rounding would
    # decide which of equally good updates Krum takes.
    products = (products + products.T) / 2
    squares = products.diagonal()
    found = (squares[:, None] + squares[None, :] - 2 * products).clamp_(min=0)
    found = found.nan_to_num_(nan=torch.inf, posinf=torch.inf)  # too far apart for float64
    return found.fill_diagonal_(0)


def krum_scores(distances_between: Tensor, f: int) -> Tensor:
    """Return the sum of squared distances to the n - f - 2 nearest other rows, at least to one, (clients,)."""
    others = len(distances_between) - 1
    nearest = min(others, max(1, others - f - 1))
    # The first of each sorted row is the distance to itself, 0.
    return distances_between.sort(dim=1).values[:, : nearest + 1].sum(dim=1)


def trimmed_mean(rows: Tensor, trim: int) -> tuple[Tensor, list[int]]:
    """Return the mean of each column without its `trim` lowest and highest values, and the rows that never contribute.

    Zeros do not count as a contribution: an attacker who multiplies its update has zeros where it has no samples.
    """
    import torch

    clients, size = rows.shape
    combined = torch.empty(size, dtype=torch.float64, device=rows.device)
    was_trimmed = torch.zeros(clients, dtype=torch.bool, device=rows.device)
    was_used = torch.zeros(clients, dtype=torch.bool, device=rows.device)
    for part, block in blocks(rows):
        ordered = block.sort(dim=0).values
        low, high = ordered[trim], ordered[clients - trim - 1]
        combined[part] = ordered[trim : clients - trim].mean(dim=0).clamp(low, high)
        was_trimmed |= ((block < low) | (block > high)).any(dim=1)
        was_used |= ((block >= low) & (block <= high) & (block != 0)).any(dim=1)
    return combined, rejected_places(was_trimmed & ~was_used)


def rejected_places(is_out: Tensor) -> list[int]:
    """Return the places of rejected rows; none if it were all of them, because then no row stands out."""
    found: list[int] = is_out.nonzero().flatten().tolist()
    return found if len(found) < len(is_out) else []


def complement(chosen: Sequence[int], count: int) -> list[int]:
    """Return the places below `count` that are not in `chosen`."""
    return sorted(set(range(count)) - set(chosen))
