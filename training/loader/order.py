"""Which samples a step takes.

A sample's place is a pure function of (seed, epoch, index), so the order needs no memory but the number of samples
consumed, and is the same on any number of ranks (protocols.md §5).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from training.data import Ids

ROUNDS = 6
AHEAD = 4096
"""Places whose sample is looked up at once: numpy's cost a call is then spread over many steps."""


class Order:
    """The order of `samples` samples: place p is sample `ids([p])` of epoch p // samples.

    Each epoch is a permutation of its own, computed place by place by a Feistel network on a grid just larger than the
    data, walking on while it lands outside. So nothing is stored or shuffled, whatever the size.
    """

    def __init__(self, samples: int, seed: int) -> None:
        if samples < 1:
            raise ValueError("there are no samples to order")
        self._samples = samples
        self._rows = int(np.ceil(np.sqrt(samples)))
        self._columns = -(-samples // self._rows)
        self._seed = np.uint64(seed)

    def ids(self, places: Ids) -> Ids:
        """The samples at these places (int64, any shape of one dim)."""
        epoch, index = np.divmod(places, self._samples)
        key = _mix((epoch.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ _mix(self._seed))
        found = self._shuffle(index.astype(np.uint64), key)
        while (outside := found >= self._samples).any():
            found[outside] = self._shuffle(found[outside], key[outside])
        return found.astype(np.int64)

    def _shuffle(self, index: np.ndarray, key: np.ndarray) -> np.ndarray:
        """A permutation of the grid's cells: each round shifts one coordinate by a hash of the other."""
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
    """splitmix64's finalizer: every bit of the input moves every bit of the output."""
    mixed = np.asarray(value, dtype=np.uint64)
    with np.errstate(over="ignore"):
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


@dataclass(frozen=True)
class Share:
    """One data-parallel coordinate's part of every global batch, cut into micro-batches.

    Consecutive places, as even as they come: after a shrink the batch may not divide, and stays the same batch.
    """

    index: int
    count: int
    global_batch: int
    micro_batch: int
    """At most this many samples go through the model at once."""

    @property
    def start(self) -> int:
        return self.index * self.global_batch // self.count

    @property
    def size(self) -> int:
        return (self.index + 1) * self.global_batch // self.count - self.start

    def cuts(self) -> list[slice]:
        """The micro-batches, as slices of this share; as even as they come.

        As many as the largest share has, on every coordinate: each gathers what the others hold in every one of them.
        So where shares are uneven, one may be empty.
        """
        largest = -(-self.global_batch // self.count)
        pieces = -(-largest // self.micro_batch)
        edges = [piece * self.size // pieces for piece in range(pieces + 1)]
        return [slice(low, high) for low, high in zip(edges, edges[1:], strict=False)]


class Loader:
    """A share's samples of step after step, from any position. Holds nothing that a checkpoint needs."""

    def __init__(self, order: Order, share: Share) -> None:
        self._order, self._share = order, share
        self._cuts = share.cuts()
        self._steps = max(1, AHEAD // max(1, share.size))
        self._first = self._end = 0
        self._known: np.ndarray = np.empty((0, share.size), dtype=np.int64)

    @property
    def stride(self) -> int:
        """The samples from one step's position to the next's."""
        return self._share.global_batch

    def ids(self, consumed: int) -> list[Ids]:
        """The micro-batches of the step that begins when `consumed` samples have been consumed, by all ranks."""
        batch = self._share.global_batch
        row, offset = divmod(consumed - self._first, batch)
        if offset or not 0 <= row < len(self._known):
            self._look_up(consumed)
            row = 0
        samples = self._known[row]
        return [samples[cut] for cut in self._cuts]

    def _look_up(self, consumed: int) -> None:
        step = np.arange(self._steps, dtype=np.int64)[:, None] * self._share.global_batch
        places = consumed + self._share.start + step + np.arange(self._share.size, dtype=np.int64)
        self._known = self._order.ids(places.reshape(-1)).reshape(places.shape)
        self._first = consumed


def fixed_batch(batch: int, *, of: int, samples: int, share: Share) -> list[Ids]:
    """This share of the `batch`-th of `of` global batches that look over all the samples, by micro-batch.

    They are spread over the data evenly: neighbours are often of one document, and a few of them tell of that alone.
    Always the same ones, each once, and nothing past the end. As many micro-batches as ever, empty ones too: every
    coordinate has to come along.
    """
    wanted = min(of * share.global_batch, samples)
    first = batch * share.global_batch + share.start
    places = np.arange(first, min(first + share.size, wanted), dtype=np.int64)
    ids = places * samples // max(1, wanted)
    return [ids[cut] for cut in share.cuts()]
