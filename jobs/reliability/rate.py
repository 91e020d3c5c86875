"""Failures per node-day: the rate, the mean time between failures, and their confidence intervals. No Django."""

from __future__ import annotations

from dataclasses import dataclass

from jobs.reliability import poisson

MIN_FAILURES = 3
"""With fewer no mean time is given."""
THOUSAND = 1_000


@dataclass(frozen=True)
class Rate:
    """The observed failure rate of one node, with a 95 % interval."""

    failures: int
    node_days: float

    @property
    def is_few(self) -> bool:
        return self.failures < MIN_FAILURES

    @property
    def per_day(self) -> float:
        return self.failures / self.node_days if self.node_days else 0.0

    @property
    def low_per_day(self) -> float:
        return poisson.interval(self.failures)[0] / self.node_days if self.node_days else 0.0

    @property
    def high_per_day(self) -> float:
        return poisson.interval(self.failures)[1] / self.node_days if self.node_days else 0.0

    @property
    def per_thousand(self) -> float | None:
        """Return failures per 1,000 node-days; None if no nodes were allocated."""
        return THOUSAND * self.per_day if self.node_days else None

    @property
    def per_thousand_interval(self) -> tuple[float, float] | None:
        return (THOUSAND * self.low_per_day, THOUSAND * self.high_per_day) if self.node_days else None

    @property
    def mtbf_days(self) -> float | None:
        """Return the mean time between failures of one node in days; None if there are too few failures."""
        return None if self.is_few or not self.node_days else 1 / self.per_day

    @property
    def mtbf_days_interval(self) -> tuple[float, float] | None:
        return None if self.is_few or not self.node_days else (1 / self.high_per_day, 1 / self.low_per_day)


@dataclass(frozen=True)
class AssumedRate:
    """A rate that was not observed here."""

    per_day: float

    @property
    def low_per_day(self) -> float:
        return self.per_day

    @property
    def high_per_day(self) -> float:
        return self.per_day
