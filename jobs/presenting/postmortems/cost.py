"""Describe what a failure cost: steps, GPU-hours, money, and the time until the job had caught up."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from vigil_core import formatting


@dataclass(frozen=True, kw_only=True)
class NextAttempt:
    """The attempt that followed a failure, and its progress so far."""

    number: int
    state: str
    queued_at: datetime
    started_at: datetime | None = None
    ended_at: datetime | None = None
    from_step: int = 0
    first_step_at: datetime | None = None  # actions that Vigil took itself
    caught_up_at: datetime | None = None
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one failure: work since the last checkpoint, plus allocated time until training resumed.

    None means that a value is not known, or not yet.
    """

    steps: int | None
    lost_seconds: float
    gpu_hours: float | None
    money: float | None
    currency: str
    detect_seconds: float | None
    resume_seconds: float | None
    catch_up_seconds: float | None
    is_awaited: bool
    """Whether ranks restart automatically but have not resumed training yet."""

    @property
    def money_text(self) -> str:
        return "" if self.money is None else formatting.money(self.money, self.currency)
