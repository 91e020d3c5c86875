"""What so many nodes must expect in so many days: failures, the chance of none, what is kept of the time. No Django."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jobs.reliability import save_interval
from jobs.reliability.rate import Assumed, Rate

DAY_S = 86_400.0
POINTS = 81
WIDE = 12.0
"""The curve goes from the best period divided by so much to the best period times so much."""


@dataclass(frozen=True)
class Plan:
    """A run: nodes held together, days, seconds that a save costs and that it takes to train again after a failure."""

    nodes: int
    days: float
    save_seconds: float
    restart_seconds: float


@dataclass(frozen=True)
class Forecast:
    """`low` and `high`: with the ends of the rate's interval."""

    plan: Plan
    rate: Rate | Assumed
    failures: float
    failures_low: float
    failures_high: float

    @property
    def none(self) -> float:
        """The chance that nothing fails."""
        return math.exp(-self.failures)

    @property
    def none_low(self) -> float:
        return math.exp(-self.failures_high)

    @property
    def none_high(self) -> float:
        return math.exp(-self.failures_low)

    @property
    def mtbf_seconds(self) -> float:
        """Between failures of all its nodes together."""
        return DAY_S / (self.rate.per_day * self.plan.nodes)

    @property
    def best_seconds(self) -> float:
        return save_interval.best_period(self.plan.save_seconds, self.mtbf_seconds)

    @property
    def young_seconds(self) -> float:
        return save_interval.young(self.plan.save_seconds, self.mtbf_seconds)

    def effective(self, period: float) -> float:
        """The part of held time that is kept, saving every `period` seconds."""
        plan = self.plan
        return save_interval.effective(
            period, cost=plan.save_seconds, mtbf=self.mtbf_seconds, restart=plan.restart_seconds
        )

    @property
    def best(self) -> float:
        return self.effective(self.best_seconds)

    def curve(self) -> list[tuple[float, float]]:
        """(period, effective) around the best period, on a logarithmic scale."""
        middle, half = self.best_seconds, (POINTS - 1) / 2
        periods = [middle * WIDE ** ((i - half) / half) for i in range(POINTS)]
        return [(period, self.effective(period)) for period in periods if period > self.plan.save_seconds]


def forecast(plan: Plan, rate: Rate | Assumed) -> Forecast:
    days = plan.nodes * plan.days
    return Forecast(plan, rate, rate.per_day * days, rate.low_per_day * days, rate.high_per_day * days)
