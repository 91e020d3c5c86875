"""Track how far an attempt is by its ranks' reports: step, steps, phase, incarnation and rank 0's newest values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jobs.models import Attempt
from vigil_core import untrusted

LATEST = 64  # series whose newest value is stored for lists
FADE_SECONDS = 60.0  # how fast the pace forgets


@dataclass
class AttemptProgress:
    """The progress of an attempt.

    Only the newest incarnation advances it: late reports of a superseded rank change nothing.
    """

    step: int | None
    steps: int | None
    phase: str
    incarnation: int
    latest: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_attempt(cls, attempt: Attempt) -> AttemptProgress:
        return cls(attempt.step, attempt.steps, attempt.phase, attempt.incarnation, dict(attempt.latest))

    def apply_to(self, attempt: Attempt) -> dict[str, Any]:
        """Set the attempt's fields, and return them for an UPDATE."""
        fields = {name: getattr(self, name) for name in ("step", "steps", "phase", "incarnation", "latest")}
        for name, value in fields.items():
            setattr(attempt, name, value)
        return fields

    @staticmethod
    def pace(attempt: Attempt, step: int | None, now: datetime) -> dict[str, float]:
        """Return the pace after a report at `now` that brings the attempt to `step`, in wall time.

        Wall time includes validation and saves. Two sums fade alike, so that their ratio is right from the second
        report on and through an outage.
        """
        if attempt.last_report_at is None or attempt.step is None or step is None or step < attempt.step:
            return {"pace_seconds": 0.0, "pace_steps": 0.0}
        seconds = max(0.0, (now - attempt.last_report_at).total_seconds())
        decay = math.exp(-seconds / FADE_SECONDS)
        return {
            "pace_seconds": attempt.pace_seconds * decay + seconds,
            "pace_steps": attempt.pace_steps * decay + (step - attempt.step),
        }

    def add_points(self, name: str, incarnation: int, step: NDArray[np.int64], value: NDArray[np.float64]) -> None:
        """Add rank 0's points of one series, in order of arrival."""
        if not len(step) or not self._is_current(incarnation):
            return
        self._reach(int(step.max()))
        if name in self.latest or len(self.latest) < LATEST:
            self.latest[name] = json_float(float(value[-1]))

    def add_event(self, kind: str, incarnation: int | None, rank: int | None, data: Mapping[str, Any]) -> None:
        """Add an event of rank 0; those of other ranks repeat it, or are a launcher's."""
        if rank != 0 or incarnation is None or not self._is_current(incarnation):
            return
        if kind == "phase" and isinstance(phase := data.get("phase"), str):
            self.phase = phase[:32]
        if kind in {"run.started", "progress"} and (steps := untrusted.count(data.get("steps"))) is not None:
            self.steps = steps
        if kind == "phase" and self.step is None:
            return  # before it has begun it counts from 0, wherever it will go on from
        step = untrusted.count(data.get("start_step" if kind == "run.started" else "step"))
        if kind in {"run.started", "progress", "phase", "run.completed"} and step is not None:
            self._reach(step)

    def _is_current(self, incarnation: int) -> bool:
        """Return whether a report is of the newest incarnation; a newer one resets the progress."""
        if incarnation > self.incarnation:
            self.incarnation, self.step, self.phase = incarnation, None, ""
        return incarnation == self.incarnation

    def _reach(self, step: int) -> None:
        self.step = step if self.step is None else max(step, self.step)


def json_float(value: float) -> float | str:
    """Return a float as JSON has it: NaN and the infinities by their names."""
    if np.isfinite(value):
        return value
    return "NaN" if np.isnan(value) else "Infinity" if value > 0 else "-Infinity"
