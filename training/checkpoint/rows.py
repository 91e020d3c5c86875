"""Save state that a run changes row by row, block by block, without copying it as a whole.

Other state is copied at the step boundary and written from the copy (staging.py). The state that a federation stores
for its clients is thousands of times the model's size, and a copy would double it. Therefore:

    at the boundary      `freeze` marks every row as unwritten, and copies nothing
    the writing thread   copies one block after the other, writes it, and frees it
    training             `write` preserves the old values of rows that are still unwritten before it changes them

The file has every row as it was at the boundary. Preserved values are freed with their block. Where training is
faster than the disk, it waits for blocks to be written rather than preserving more than a fraction of the rows: the
memory that a run takes must not depend on the speed of its disk. It does not wait for long, though, as the watchdog
would take that for a hang: with a disk that stands still it continues, and preserves everything that it changes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_BYTES = 1 << 20
"""Large enough that torch's 2 kB per block do not matter, small compared with a chunk of clients' working memory."""
MAX_PRESERVED = 1 / 16
"""Fraction of a rank's rows that may be preserved at a time before training waits."""
MIN_PRESERVED_BYTES = 8 << 20
"""Bytes that may be preserved without waiting, however few rows there are."""
PATIENCE_SECONDS = 10.0
"""How long training waits per save and tensor: a sixth of the shortest step time limit of the watchdog."""


class Rows:
    """This rank's rows of a tensor (rows of all ranks, …), on the CPU or a GPU."""

    def __init__(self, tensor: Tensor, *, first: int = 0, total: int | None = None) -> None:
        """Track this rank's rows, `tensor` (rows, …).

        `first`: the global index of its first row; `total`: rows of all ranks.
        """
        self.tensor, self.first = tensor, first
        self.shape = torch.Size((len(tensor) if total is None else total, *tensor.shape[1:]))
        """Shape of the whole tensor, over all ranks."""
        self._frozen: FrozenRows | None = None
        self._changed = threading.Condition()

    @property
    def nbytes(self) -> int:
        """Bytes on this rank."""
        return self.tensor.nbytes

    def write(self, indices: Tensor, values: Tensor) -> None:
        """Replace the rows at `indices` (n,), distinct indices into this rank's rows, by `values` (n, …)."""
        with self._changed:
            if self._frozen is not None:
                self._frozen.preserve(indices)
            self.tensor[indices] = values

    def freeze(self) -> FrozenRows:
        """Return all rows as they are now, to be released once they are written. One save at a time."""
        with self._changed:
            self._frozen = FrozenRows(self.tensor, self.first, self.shape, self._changed)
        return self._frozen

    def frozen_copy(self, copy: Tensor) -> FrozenRows:
        """Return all rows as they are in a copy of this rank's, which nobody changes."""
        return FrozenRows(copy, self.first, self.shape, threading.Condition())


class FrozenRows:
    """This rank's rows as they were when frozen, to be taken once, block by block."""

    def __init__(self, tensor: Tensor, first: int, shape: torch.Size, changed: threading.Condition) -> None:
        """`changed`: locked while rows or preserved values change; notified when fewer values are preserved."""
        self.tensor, self.first, self.shape = tensor, first, shape
        self._changed = changed
        self._row_bytes = math.prod(shape[1:]) * tensor.element_size()
        self._max_preserved = max(MIN_PRESERVED_BYTES, MAX_PRESERVED * tensor.nbytes)
        self._patience = PATIENCE_SECONDS
        self._unwritten = torch.ones(len(tensor), dtype=torch.bool)
        """(rows,): neither taken nor preserved."""
        self._preserved: list[tuple[Tensor, Tensor]] = []
        """Indices (n,) and the values (n, …) that these rows had."""

    @property
    def preserved_bytes(self) -> int:
        return sum(values.nbytes for _, values in self._preserved)

    def blocks(self) -> Iterator[range]:
        """Yield the rows of each block, counted from this rank's first."""
        size = max(1, BLOCK_BYTES // max(1, self._row_bytes))
        for begin in range(0, len(self.tensor), size):
            yield range(begin, min(begin + size, len(self.tensor)))

    def take(self, block: range) -> Tensor:
        """Return a copy of a block's rows (n, …) as they were, and free the preserved ones among them."""
        with self._changed:
            rows = self.tensor[block.start : block.stop].clone()
            self._unwritten[block.start : block.stop] = False
            rest = []
            for indices, values in self._preserved:
                inside = (indices >= block.start) & (indices < block.stop)
                rows[indices[inside] - block.start] = values[inside]
                if not bool(inside.all()):
                    rest.append((indices[~inside], values[~inside]) if bool(inside.any()) else (indices, values))
            self._preserved = rest
            self._changed.notify_all()
        return rows

    def preserve(self, indices: Tensor) -> None:
        """Copy those rows at `indices` (n,) that are still unwritten, before they change. `changed` is locked."""
        self._wait_for_space(indices)
        unwritten = indices[self._unwritten[indices]]
        if len(unwritten):
            self._preserved.append((unwritten, self.tensor[unwritten]))
            self._unwritten[unwritten] = False

    def release(self) -> None:
        """Free preserved values: no further block will be taken."""
        with self._changed:
            self._unwritten[:] = False
            self._preserved = []
            self._changed.notify_all()

    def _wait_for_space(self, indices: Tensor) -> None:
        while self._patience > 0:
            more = int(self._unwritten[indices].sum()) * self._row_bytes
            if not more or self.preserved_bytes + more <= self._max_preserved:
                return
            began = time.monotonic()
            self._changed.wait(self._patience)
            self._patience -= time.monotonic() - began
