"""State that a run changes row by row, saved block by block without a copy of the whole.

Other state is copied at the step boundary and written from the copy (staging.py). What a federation stores for its
clients is thousands of times the model's size, and a copy would double it. So:

    at the boundary      `freeze` marks every row as unwritten, and copies nothing
    the writing thread   copies one block after the other, writes it, and frees it
    training             before it changes rows that are still unwritten, `write` sets their old values aside

The file has every row as it was at the boundary. What is set aside is freed with its block. Where training is faster
than the disk it waits for blocks to be written rather than set more than a part of the rows aside: how much memory a
run takes does not follow from how fast its disk is. It does not wait for long, though, as the watchdog would take that
for a hang: behind a disk that stands still it goes on, and sets aside all that it changes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_BYTES = 1 << 20
"""Large enough that torch's 2 kB a block are nothing, small beside what one chunk of clients computes with."""
MOST_ASIDE = 1 / 16
"""Of a rank's rows, set aside at a time before training waits."""
LEAST_ASIDE_BYTES = 8 << 20
"""Set aside without waiting, however few the rows are."""
PATIENCE_SECONDS = 10.0
"""For which training waits during one save, of each tensor: a sixth of the least that the watchdog allows a step."""


class Rows:
    """This rank's rows of a tensor (rows of all ranks, …), on the CPU or a GPU."""

    def __init__(self, tensor: Tensor, *, first: int = 0, total: int | None = None) -> None:
        """`tensor` (rows, …): this rank's; `first`: which of all rows its first one is; `total`: rows of all ranks."""
        self.tensor, self.first = tensor, first
        self.shape = torch.Size((len(tensor) if total is None else total, *tensor.shape[1:]))
        """Of the whole, over all ranks."""
        self._frozen: Frozen | None = None
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        """Bytes on this rank."""
        return self.tensor.nbytes

    def write(self, where: Tensor, values: Tensor) -> None:
        """Replace the rows at `where` (n,), distinct places within this rank's, by `values` (n, …)."""
        with self._changed:
            if self._frozen is not None:
                self._frozen.set_aside(where)
            self.tensor[where] = values

    def freeze(self) -> Frozen:
        """Return all rows as they are now, to be released once they are written. One save at a time."""
        with self._changed:
            self._frozen = Frozen(self.tensor, self.first, self.shape, self._changed)
        return self._frozen

    def copied_to(self, copy: Tensor) -> Frozen:
        """Return all rows as they are in a copy of this rank's, which nobody changes."""
        return Frozen(copy, self.first, self.shape, threading.Condition())


class Frozen:
    """This rank's rows as they were when they were frozen, to be taken once, block by block."""

    def __init__(self, tensor: Tensor, first: int, shape: torch.Size, changed: threading.Condition) -> None:
        """`changed`: held where rows or what was set aside change; notified where that has become less."""
        self.tensor, self.first, self.shape = tensor, first, shape
        self._changed = changed
        self._row_bytes = math.prod(shape[1:]) * tensor.element_size()
        self._most_aside = max(LEAST_ASIDE_BYTES, MOST_ASIDE * tensor.nbytes)
        self._patience = PATIENCE_SECONDS
        self._unwritten = torch.ones(len(tensor), dtype=torch.bool)
        """(rows,): neither taken nor set aside."""
        self._aside: list[tuple[Tensor, Tensor]] = []
        """Places (n,) and the values (n, …) that they had."""

    @property
    def bytes_aside(self) -> int:
        return sum(values.nbytes for _, values in self._aside)

    def blocks(self) -> Iterator[range]:
        """Yield the rows of each block, counted from this rank's first."""
        size = max(1, BLOCK_BYTES // max(1, self._row_bytes))
        for begin in range(0, len(self.tensor), size):
            yield range(begin, min(begin + size, len(self.tensor)))

    def take(self, block: range) -> Tensor:
        """Return a copy of a block's rows (n, …) as they were; what was set aside of them is freed."""
        with self._changed:
            found = self.tensor[block.start : block.stop].clone()
            self._unwritten[block.start : block.stop] = False
            left = []
            for places, values in self._aside:
                inside = (places >= block.start) & (places < block.stop)
                found[places[inside] - block.start] = values[inside]
                if not bool(inside.all()):
                    left.append((places[~inside], values[~inside]) if bool(inside.any()) else (places, values))
            self._aside = left
            self._changed.notify_all()
        return found

    def set_aside(self, where: Tensor) -> None:
        """Copy those rows at `where` (n,) that are still unwritten, before they change. `changed` is held."""
        self._wait_for_room(where)
        unwritten = where[self._unwritten[where]]
        if len(unwritten):
            self._aside.append((unwritten, self.tensor[unwritten]))
            self._unwritten[unwritten] = False

    def release(self) -> None:
        """Free what was set aside: nobody takes another block."""
        with self._changed:
            self._unwritten[:] = False
            self._aside = []
            self._changed.notify_all()

    def _wait_for_room(self, where: Tensor) -> None:
        while self._patience > 0:
            more = int(self._unwritten[where].sum()) * self._row_bytes
            if not more or self.bytes_aside + more <= self._most_aside:
                return
            began = time.monotonic()
            self._changed.wait(self._patience)
            self._patience -= time.monotonic() - began
