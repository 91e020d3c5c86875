"""Provide a rank's batches: loaded ahead of time, this rank's part of each sample, on its device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from training.data import Batch, Ids, Split, Task
from training.loader.order import Loader
from training.loader.prefetch import Prefetch

PLACEHOLDER: Ids = np.zeros(1, dtype=np.int64)
"""The sample that is used where a micro-batch is empty."""


@dataclass(frozen=True)
class LoadedBatch:
    """A micro-batch and the ids of its samples."""

    ids: Ids
    batch: Batch
    """The batch of these samples; if there are none, of a placeholder that must not count."""


class Feed:
    """The source of the training loop's samples. It stores no position: the loop passes one.

    On a GPU the thread leaves batches in page-locked memory, from which the copy runs in parallel to the previous
    step; it is queued on the loop's own stream, so nothing has to be waited for. `divide` runs in the thread, too.
    """

    def __init__(
        self, task: Task, loader: Loader, *, divide: Callable[[Batch], Batch], device: torch.device, end: int
    ) -> None:
        self._task, self._loader, self._divide, self._device = task, loader, divide, device
        self._prefetch = Prefetch(self._make, stride=loader.stride, end=end)
        self.waited = 0.0
        """Seconds that the last `take` took, which the loop lost waiting for data."""

    def take(self, consumed: int) -> list[LoadedBatch]:
        """Return the micro-batches of the step that begins after `consumed` samples, on the device."""
        began = time.perf_counter()
        parts = [LoadedBatch(part.ids, self._to_device(part.batch)) for part in self._prefetch.take(consumed)]
        self.waited = time.perf_counter() - began
        return parts

    def load(self, split: Split, ids: Ids) -> LoadedBatch:
        """Return specific samples immediately, on the device."""
        part = self._part(split, ids)
        return LoadedBatch(ids, self._to_device(part.batch))

    def close(self) -> None:
        self._prefetch.close()

    def _make(self, consumed: int) -> list[LoadedBatch]:
        return [self._part("train", ids) for ids in self._loader.ids(consumed)]

    def _part(self, split: Split, ids: Ids) -> LoadedBatch:
        batch = self._divide(self._task.batch(split, ids if len(ids) else PLACEHOLDER))
        if self._device.type == "cuda":
            # A thread starts on the first GPU, which may be another rank's. Views are made contiguous before the copy.
            with torch.cuda.device(self._device):
                batch = tuple(tensor.contiguous().pin_memory() for tensor in batch)
        return LoadedBatch(ids, batch)

    def _to_device(self, batch: Batch) -> Batch:
        if self._device.type == "cpu":
            return batch
        return tuple(tensor.to(self._device, non_blocking=True) for tensor in batch)
