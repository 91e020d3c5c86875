"""A rank's batches: looked up ahead of time, this rank's part of each sample, brought to its device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from training.data import Batch, Ids, Split, Task
from training.loader.order import Loader
from training.loader.prefetch import Prefetch

STAND_IN: Ids = np.zeros(1, dtype=np.int64)
"""The sample that is looked at where there is none."""


@dataclass(frozen=True)
class Part:
    """A micro-batch, and which samples it is made of."""

    ids: Ids
    batch: Batch
    """The batch of these samples; where there are none, of one that stands in and must count nothing."""


class Feed:
    """What the training loop takes its samples from. It knows no position: the loop asks for one.

    On a GPU the thread leaves batches in page-locked memory, from which the copy runs beside the step before; it is
    queued on the loop's own stream, so nothing has to be waited for. `divide` runs in the thread, too.
    """

    def __init__(
        self, task: Task, loader: Loader, *, divide: Callable[[Batch], Batch], device: torch.device, end: int
    ) -> None:
        self._task, self._loader, self._divide, self._device = task, loader, divide, device
        self._prefetch = Prefetch(self._make, stride=loader.stride, end=end)
        self.waited = 0.0
        """Seconds that the last `take` took: what the loop lost to its data."""

    def take(self, consumed: int) -> list[Part]:
        """The micro-batches of the step that begins when `consumed` samples have been consumed, on the device."""
        began = time.perf_counter()
        parts = [Part(part.ids, self._bring(part.batch)) for part in self._prefetch.take(consumed)]
        self.waited = time.perf_counter() - began
        return parts

    def look_up(self, split: Split, ids: Ids) -> Part:
        """Certain samples, now, on the device."""
        part = self._part(split, ids)
        return Part(ids, self._bring(part.batch))

    def close(self) -> None:
        self._prefetch.close()

    def _make(self, consumed: int) -> list[Part]:
        return [self._part("train", ids) for ids in self._loader.ids(consumed)]

    def _part(self, split: Split, ids: Ids) -> Part:
        batch = self._divide(self._task.batch(split, ids if len(ids) else STAND_IN))
        if self._device.type == "cuda":
            # A thread starts on the first GPU, whoever's that is. A view is laid out first, to be copied from there.
            with torch.cuda.device(self._device):
                batch = tuple(tensor.contiguous().pin_memory() for tensor in batch)
        return Part(ids, batch)

    def _bring(self, batch: Batch) -> Batch:
        if self._device.type == "cpu":
            return batch
        return tuple(tensor.to(self._device, non_blocking=True) for tensor in batch)
