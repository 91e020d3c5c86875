"""Forecast failures of N nodes over T days, the probability of none, and the share of useful time. No Django."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jobs.reliability import save_interval
from jobs.reliability.rate import AssumedRate, Rate

DAY_S = 86_400.0
POINTS = 81
SPAN_FACTOR = 12.0
"""The curve spans the best period divided and multiplied by this."""


@dataclass(frozen=True)
class Plan:
    """A planned run: its nodes and days, and two times in seconds.

    `save_seconds`: the cost of a save. `restart_seconds`: from a failure until training resumes.
    """

    nodes: int
    days: float
    save_seconds: float
    restart_seconds: float


@dataclass(frozen=True)
class Forecast:
    """The expected failures; `low` and `high` use the ends of the rate's interval."""

    plan: Plan
    rate: Rate | AssumedRate
    failures: float
    failures_low: float
    failures_high: float

    @property
    def no_failure_probability(self) -> float:
        """Return the probability that nothing fails."""
        return math.exp(-self.failures)

    @property
    def no_failure_probability_interval(self) -> tuple[float, float]:
        return math.exp(-self.failures_high), math.exp(-self.failures_low)

    @property
    def mtbf_seconds(self) -> float:
        """Return the mean time between failures of all nodes together."""
        return DAY_S / (self.rate.per_day * self.plan.nodes)

    @property
    def best_seconds(self) -> float:
        return save_interval.best_period(self.plan.save_seconds, self.mtbf_seconds)

    @property
    def young_seconds(self) -> float:
        return save_interval.young(self.plan.save_seconds, self.mtbf_seconds)

    def useful_share(self, period: float) -> float:
        """Return the share of allocated time that is useful if the run saves every `period` seconds."""
        plan = self.plan
        return save_interval.useful_share(
            period, cost=plan.save_seconds, mtbf=self.mtbf_seconds, restart=plan.restart_seconds
        )

    @property
    def best_useful_share(self) -> float:
        return self.useful_share(self.best_seconds)

    def curve(self) -> list[tuple[float, float]]:
        """Return (period, useful share) around the best period, on a logarithmic scale."""
        middle, half = self.best_seconds, (POINTS - 1) / 2
        periods = [middle * SPAN_FACTOR ** ((i - half) / half) for i in range(POINTS)]
        return [(period, self.useful_share(period)) for period in periods if period > self.plan.save_seconds]


def forecast(plan: Plan, rate: Rate | AssumedRate) -> Forecast:
    days = plan.nodes * plan.days
    return Forecast(plan, rate, rate.per_day * days, rate.low_per_day * days, rate.high_per_day * days)
