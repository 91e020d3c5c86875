"""Batches of clients: in which order each goes through its data, and which of them can be computed together.

All of it follows from numbers: the seed, the round, a client's number and how many samples it has. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training.runtime.seeds import derive_seed

STACKED_NUMBERS = 4 * 2**20
"""Numbers of parameters in one chunk at most: more fell out of the cache and gained nothing."""
STACKED_CLIENTS = 256
"""Clients in one chunk at most."""
ALONE_CLIENTS = 8
"""Of those that are computed one by one, in one chunk at most: their sum is kept once for all of them."""
FINE = 16
"""So many chunks at least, where there are so many clients: to spread evenly over ranks."""

Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Chunk:
    """Clients that have the same work in this round, by number; computed together, or one after the other."""

    clients: Ids
    steps: int
    """Of each of them."""
    width: int
    """Places in a batch; a client may leave some of them empty."""

    @property
    def cost(self) -> int:
        return len(self.clients) * self.steps * self.width


def widths_of(samples: NDArray[np.int64], batch: int) -> Ids:
    """Places in the batches of each client: a power of two that holds all that it has, at most `batch`."""
    powers = 2 ** np.ceil(np.log2(np.maximum(samples, 1))).astype(np.int64)
    return np.minimum(powers, batch)


def cut(clients: Ids, steps: Ids, widths: Ids, *, numbers: int, alone: bool) -> list[Chunk]:
    """The chunks of a round: a function of who takes part and what they do, never of how many ranks there are.

    Else a client would be computed beside others, and its last bits differ: of 100 small convolutional networks 82 did.
    """
    if alone:
        largest = min(ALONE_CLIENTS, max(1, len(clients) // FINE))
    else:
        largest = max(1, min(STACKED_CLIENTS, STACKED_NUMBERS // max(1, numbers)))
    order = np.lexsort((clients, widths, steps))
    found = []
    keys = np.stack([steps[order], widths[order]], axis=1)
    bounds = np.flatnonzero(np.any(np.diff(keys, axis=0) != 0, axis=1)) + 1
    for group in np.split(order, bounds) if len(order) else []:
        for begin in range(0, len(group), largest):
            part = group[begin : begin + largest]
            found.append(Chunk(clients[part], int(steps[part[0]]), int(widths[part[0]])))
    return found


def shares(chunks: Sequence[Chunk], ranks: int) -> list[range]:
    """The chunks of each rank: one range each, of about the same cost."""
    costs = np.cumsum([chunk.cost for chunk in chunks], dtype=np.float64)
    total = costs[-1] if len(costs) else 0.0
    ends = [int(np.searchsorted(costs, total * (rank + 1) / ranks - 1e-9)) + 1 for rank in range(ranks - 1)]
    ends = [*(min(end, len(chunks)) for end in ends), len(chunks)]
    return [range(begin, max(begin, end)) for begin, end in zip([0, *ends], ends, strict=False)]


def batches(chunk: Chunk, owned: Sequence[Ids], batch: int, *, seed: int, round_: int) -> tuple[Ids, NDArray[np.bool_]]:
    """Ids of samples (clients, steps, width), and which places hold one; the others repeat the client's first.

    Each time through its data a client takes them in another order, all of them, in batches of `batch`.
    """
    sizes = np.array([len(ids) for ids in owned], dtype=np.int64)
    most = int(sizes.max())
    per_epoch = -(-most // batch)
    epochs = -(-chunk.steps // max(1, int((-(-sizes // batch)).min())))
    table = np.zeros((len(owned), most), dtype=np.int64)
    for row, ids in zip(table, owned, strict=True):
        row[: len(ids)] = ids
    is_there = np.arange(most) < sizes[:, None]
    ids = np.empty((len(owned), epochs, per_epoch * batch), dtype=np.int64)
    there = np.zeros(ids.shape, dtype=bool)
    for epoch in range(epochs):
        order = np.argsort(np.where(is_there, _keys(chunk.clients, most, seed, round_, epoch), np.inf), axis=1)
        shuffled = np.take_along_axis(table, order, axis=1)
        ids[:, epoch] = shuffled[:, :1]
        ids[:, epoch, :most] = shuffled
        there[:, epoch, :most] = is_there  # the order puts what is there before what is not
    return _as_steps(ids, there, sizes, chunk, batch)


def _as_steps(
    ids: Ids, there: NDArray[np.bool_], sizes: NDArray[np.int64], chunk: Chunk, batch: int
) -> tuple[Ids, NDArray[np.bool_]]:
    clients, epochs, _ = ids.shape
    ids = ids.reshape(clients, epochs, -1, batch)[..., : chunk.width]
    there = there.reshape(clients, epochs, -1, batch)[..., : chunk.width]
    each = -(-sizes // batch)
    if (each == each[0]).all():  # one look instead of one a client: thousands of small clients are alike
        steps = int(each[0])
        shape = (clients, -1, chunk.width)
        return (
            np.ascontiguousarray(ids[:, :, :steps].reshape(shape)[:, : chunk.steps]),
            np.ascontiguousarray(there[:, :, :steps].reshape(shape)[:, : chunk.steps]),
        )
    picked = np.stack([ids[c, :, : each[c]].reshape(-1, chunk.width)[: chunk.steps] for c in range(clients)])
    placed = np.stack([there[c, :, : each[c]].reshape(-1, chunk.width)[: chunk.steps] for c in range(clients)])
    return picked, placed


def _keys(clients: Ids, most: int, seed: int, round_: int, epoch: int) -> NDArray[np.float64]:
    """(clients, most) numbers from 0 to 1 to sort by: of each client its own."""
    return uniform(
        _derived(_derived(np.uint64(derive_seed(seed, round_)), clients.astype(np.uint64)), np.uint64(epoch)), most
    )


def uniform(seeds: Sequence[int] | NDArray[np.uint64], many: int) -> NDArray[np.float64]:
    """(seeds, many) numbers from 0 to 1, of each seed its own."""
    base = np.asarray(seeds, dtype=np.uint64)
    words = _mixed(base[:, None] + np.arange(1, many + 1, dtype=np.uint64) * _STEP)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


_STEP = np.uint64(0x9E3779B97F4A7C15)


def _derived(seeds: NDArray[np.uint64] | np.uint64, part: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    """derive_seed's next part, of many clients at once."""
    return _mixed(seeds ^ np.atleast_1d(part) + _STEP)


def _mixed(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's (Steele, Lea & Flood, 2014, doi 10.1145/2660193.2660195); wraps around, as it should."""
    value = (value ^ value >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ value >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return value ^ value >> np.uint64(31)
