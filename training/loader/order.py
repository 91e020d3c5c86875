"""Determine which samples a step uses.

A sample's position is a pure function of (seed, epoch, index), so the order needs no state but the number of samples
consumed, and is the same on any number of ranks (protocols.md §5).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from training.data import Ids

ROUNDS = 6
AHEAD = 4096
"""Positions that are looked up at once, to spread the cost of a numpy call over many steps."""


class Order:
    """The order of `samples` samples: position p is sample `ids([p])` of epoch p // samples.

    Each epoch is a different permutation, computed per position by a Feistel network on a grid just larger than the
    data, repeated while it lands outside. So nothing is stored or shuffled, whatever the size.
    """

    def __init__(self, samples: int, seed: int) -> None:
        if samples < 1:
            raise ValueError("there are no samples to order")
        self._samples = samples
        self._rows = int(np.ceil(np.sqrt(samples)))
        self._columns = -(-samples // self._rows)
        self._seed = np.uint64(seed)

    def ids(self, positions: Ids) -> Ids:
        """Return the samples at these positions (int64, any shape of one dim)."""
        epoch, index = np.divmod(positions, self._samples)
        key = _mix((epoch.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ _mix(self._seed))
        samples = self._shuffle(index.astype(np.uint64), key)
        while (outside := samples >= self._samples).any():
            samples[outside] = self._shuffle(samples[outside], key[outside])
        return samples.astype(np.int64)

    def _shuffle(self, index: np.ndarray, key: np.ndarray) -> np.ndarray:
        """Permute the grid's cells: each round shifts one coordinate by a hash of the other."""
        rows, columns = np.uint64(self._rows), np.uint64(self._columns)
        row, column = np.divmod(index, columns)
        for turn in range(ROUNDS):
            salt = key + np.uint64(turn)
            if turn % 2:
                row = (row + _mix(column ^ salt) % rows) % rows
            else:
                column = (column + _mix(row ^ salt) % columns) % columns
        return row * columns + column


def _mix(value: np.ndarray | np.uint64) -> np.ndarray:
    """Apply splitmix64's finalizer: every bit of the input affects every bit of the output."""
    mixed = np.asarray(value, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@dataclass(frozen=True)
class Share:
    """One data-parallel coordinate's part of every global batch, divided into micro-batches.

    Consecutive positions, as even as possible: after ranks are lost the batch may not divide evenly, but stays the
    same.
    """

    index: int
    count: int
    global_batch: int
    micro_batch: int
    """Maximum samples per forward pass."""

    @property
    def start(self) -> int:
        return self.index * self.global_batch // self.count

    @property
    def size(self) -> int:
        return (self.index + 1) * self.global_batch // self.count - self.start

    def cuts(self) -> list[slice]:
        """Return the micro-batches as slices of this share, as even as possible.

        Every coordinate has as many as the one with the largest share, since in each micro-batch all ranks gather
        from all others. With uneven shares a micro-batch may therefore be empty.
        """
        largest = -(-self.global_batch // self.count)
        pieces = -(-largest // self.micro_batch)
        edges = [piece * self.size // pieces for piece in range(pieces + 1)]
        return [slice(low, high) for low, high in zip(edges, edges[1:], strict=False)]


class Loader:
    """Returns a share's samples, step after step, from any position. It has no state that a checkpoint needs."""

    def __init__(self, order: Order, share: Share) -> None:
        self._order, self._share = order, share
        self._cuts = share.cuts()
        self._steps = max(1, AHEAD // max(1, share.size))
        self._first = self._end = 0
        self._cached: np.ndarray = np.empty((0, share.size), dtype=np.int64)

    @property
    def stride(self) -> int:
        """Number of samples from one step's position to the next one's."""
        return self._share.global_batch

    def ids(self, consumed: int) -> list[Ids]:
        """Return the micro-batches of the step that begins after `consumed` samples (of all ranks)."""
        batch = self._share.global_batch
        row, offset = divmod(consumed - self._first, batch)
        if offset or not 0 <= row < len(self._cached):
            self._look_up(consumed)
            row = 0
        samples = self._cached[row]
        return [samples[cut] for cut in self._cuts]

    def _look_up(self, consumed: int) -> None:
        step = np.arange(self._steps, dtype=np.int64)[:, None] * self._share.global_batch
        positions = consumed + self._share.start + step + np.arange(self._share.size, dtype=np.int64)
        self._cached = self._order.ids(positions.reshape(-1)).reshape(positions.shape)
        self._first = consumed


def fixed_batch(batch: int, *, batches: int, samples: int, share: Share) -> list[Ids]:
    """Return this share of the `batch`-th of `batches` global batches for validation, by micro-batch.

    They are spread evenly over the data, as neighbouring samples often come from one document. They are always the
    same, each sample occurs once, and none is beyond the end. Empty micro-batches are included, as every coordinate
    has to take part in all of them.
    """
    count = min(batches * share.global_batch, samples)
    first = batch * share.global_batch + share.start
    positions = np.arange(first, min(first + share.size, count), dtype=np.int64)
    ids = positions * samples // max(1, count)
    return [ids[cut] for cut in share.cuts()]
