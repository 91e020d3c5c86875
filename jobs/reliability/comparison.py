"""Compare a count of failures with published rates: what they expect in the same time, by an exact Poisson test."""

from __future__ import annotations

from dataclasses import dataclass

from jobs.reliability import poisson
from jobs.reliability.published import PUBLISHED

THOUSAND = 1_000


@dataclass(frozen=True)
class PublishedComparison:
    """Compares failures with a published rate: how many it expects, and the probability of so many or more."""

    name: str
    source: str
    expected: float
    p: float


def compare(failures: int, node_days: float) -> list[PublishedComparison]:
    """Return the comparison with each published rate. `node_days`: of nodes with 8 GPUs."""
    return [
        PublishedComparison(
            rate.name, rate.source, expected := rate.per_thousand * node_days / THOUSAND,
            poisson.at_least(failures, expected),
        )
        for rate in PUBLISHED
    ]  # fmt: skip
