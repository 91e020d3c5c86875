"""Map times to positions in per cent of a drawing's width, and find round local times for its axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.utils import timezone


@dataclass(frozen=True)
class Scale:
    """A time range. `left` is the percentage of the width reserved for names."""

    start: datetime
    end: datetime
    left: float = 0.0

    @property
    def seconds(self) -> float:
        return (self.end - self.start).total_seconds()

    def has(self, at: datetime) -> bool:
        return self.start <= at <= self.end

    def __call__(self, at: datetime) -> float:
        share = (at - self.start).total_seconds() / self.seconds
        return round(self.left + (100 - self.left) * min(1.0, max(0.0, share)), 3)

    def marks(self, steps_s: Sequence[int], most: int) -> tuple[int, Iterator[datetime]]:
        """Return the shortest step (seconds) that gives at most `most` marks, and the marks."""
        step = next((step for step in steps_s if self.seconds / step <= most), steps_s[-1])
        return step, self._every(step)

    def _every(self, step: int) -> Iterator[datetime]:
        midnight = timezone.localtime(self.start).replace(hour=0, minute=0, second=0, microsecond=0)
        at = midnight + timedelta(seconds=step * ((self.start - midnight).total_seconds() // step + 1))
        while at < self.end:
            yield at
            at += timedelta(seconds=step)
