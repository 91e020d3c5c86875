"""What rules against bad updates have in common: how many they need, how far updates are apart, what was cut off."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from training.config.shape import Misfit
from training.federation.parts import TooFew

if TYPE_CHECKING:
    from torch import Tensor

    from training.federation.config import FederationConfig

BLOCK = 2**18
"""Numbers, of all clients together, that are brought to float64 at a time."""


def need(rows: Tensor, least: int) -> None:
    """Raises TooFew."""
    if len(rows) < least:
        raise TooFew(f"{len(rows)} updates are left, at least {least} are needed")


def waited_for(config: FederationConfig) -> int:
    """Updates that a round has at least: all that are asked for, or the quorum of a deadline."""
    quorum = config.options_of("deadline").get("quorum") if config.pace == "deadline" else None
    return config.selected if quorum is None else math.ceil(float(quorum) * config.selected)


def misfits(config: FederationConfig, option: str, value: int, *, each: int, more: int) -> Iterator[Misfit]:
    """`value` bad clients need each · value + more of them in a round; what works if there are fewer."""
    updates = waited_for(config)
    if updates >= each * value + more:
        return
    if updates < more:
        text = f'"{config.aggregation}" needs at least {more} updates a round, and {updates} are waited for.'
        yield Misfit(_size(config), f"{text} Write {_enough(config, more)}.")
        return
    most = (updates - more) // each
    yield Misfit(
        option,
        f"is {value}, for which {each * value + more} updates a round are needed, and {updates} are waited for. "
        f"Write {most}{' or less' if most else ''}, or {_enough(config, each * value + more)}.",
    )


def _size(config: FederationConfig) -> str:
    return "clients" if config.per_round is None else "per_round"


def _enough(config: FederationConfig, updates: int) -> str:
    if updates <= config.selected:  # the deadline's quorum is what leaves too few
        return f"quorum = {math.ceil(100 * updates / config.selected) / 100:g} in [run.deadline]"
    return f"{_size(config)} = {updates}"


def blocks(rows: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Some columns at a time, (clients, some) float64, and which."""
    clients, numbers = rows.shape
    width = max(1, BLOCK // max(1, clients))
    for begin in range(0, numbers, width):
        part = slice(begin, min(begin + width, numbers))
        yield part, rows[:, part].double()


def distances(rows: Tensor) -> Tensor:
    """(clients, clients) float64: squared, between any two of the rows. Nothing larger is ever made."""
    import torch

    clients = len(rows)
    products = torch.zeros(clients, clients, dtype=torch.float64, device=rows.device)
    for _, block in blocks(rows):
        # What all have in common is taken off first: it would only be rounded away. A middle one, as a mean goes
        # wherever a single bad update is.
        centred = block - block.median(dim=0).values
        products += centred @ centred.T
    # BLAS computes the two halves in different orders: without this the same pair has two distances, and which of
    # equally good updates Krum takes would depend on rounding.
    products = (products + products.T) / 2
    squares = products.diagonal()
    found = (squares[:, None] + squares[None, :] - 2 * products).clamp_(min=0)
    found = found.nan_to_num_(nan=torch.inf, posinf=torch.inf)  # too far apart for float64
    return found.fill_diagonal_(0)


def krum_scores(apart: Tensor, f: int) -> Tensor:
    """(clients,): the sum of squared distances to the n - f - 2 nearest others, at least to one where there is any."""
    others = len(apart) - 1
    nearest = min(others, max(1, others - f - 1))
    # Its own distance, 0, is the first of each row.
    return apart.sort(dim=1).values[:, : nearest + 1].sum(dim=1)


def trimmed(rows: Tensor, trim: int) -> tuple[Tensor, list[int]]:
    """The mean of each column without its `trim` lowest and highest, and which rows were cut off in all of them.

    Zeros are no evidence: who multiplies its update to do harm keeps those, of what it has no samples for.
    """
    import torch

    clients, numbers = rows.shape
    combined = torch.empty(numbers, dtype=torch.float64, device=rows.device)
    was_cut = torch.zeros(clients, dtype=torch.bool, device=rows.device)
    was_kept = torch.zeros(clients, dtype=torch.bool, device=rows.device)
    for part, block in blocks(rows):
        ordered = block.sort(dim=0).values
        low, high = ordered[trim], ordered[clients - trim - 1]
        combined[part] = ordered[trim : clients - trim].mean(dim=0).clamp(low, high)
        was_cut |= ((block < low) | (block > high)).any(dim=1)
        was_kept |= ((block >= low) & (block <= high) & (block != 0)).any(dim=1)
    return combined, some(was_cut & ~was_kept)


def some(out: Tensor) -> list[int]:
    """Places of those that are left out; none where it would be all of them: then nobody differed in what counts."""
    found: list[int] = out.nonzero().flatten().tolist()
    return found if len(found) < len(out) else []


def but(chosen: Sequence[int], of: int) -> list[int]:
    """The places that were not chosen."""
    return sorted(set(range(of)) - set(chosen))
