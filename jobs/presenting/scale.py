"""Map times to positions in per cent of a drawing's width, and find round local times for its axis."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.utils import timezone

_STEPS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 14_400, 21_600, 43_200, 86_400,
            172_800, 604_800)  # fmt: skip


@dataclass(frozen=True)
class AxisTick:
    """A round local time on an axis. At midnight its text is the day."""

    x: float
    text: str
    is_day: bool


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

    def axis(self, most: int) -> Iterator[AxisTick]:
        """Yield ticks at round local times: as many as there can be at equal steps, at most `most`."""
        step = next((step for step in _STEPS_S if self.seconds / step <= most), _STEPS_S[-1])
        for at in self._every(step):
            is_day = (at.hour, at.minute, at.second) == (0, 0, 0)
            text = f"{at:%a} {at.day} {at:%b}" if is_day else f"{at:%H:%M:%S}" if step < 60 else f"{at:%H:%M}"
            yield AxisTick(self(at), text, is_day)

    def _every(self, step: int) -> Iterator[datetime]:
        midnight = timezone.localtime(self.start).replace(hour=0, minute=0, second=0, microsecond=0)
        at = midnight + timedelta(seconds=step * ((self.start - midnight).total_seconds() // step + 1))
        while at < self.end:
            yield at
            at += timedelta(seconds=step)
