"""Count machine failures by the inlet temperature of the rack at that time, with exact Poisson intervals.

Exposure is the time that the rack's nodes were at that temperature, whether jobs ran there or not. Measured hours and
estimated ones have bands of their own, as an estimate may be off by degrees. A band in which less than FEW failures
happened says nothing alone: its rate has an interval all the same. A node that was moved counts in its present rack.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from typing import NamedTuple

from django.db.models import ExpressionWrapper, F, FloatField, Q, Sum
from django.db.models.functions import Floor

from jobs.failures.kinds import MACHINES
from jobs.models import Failure
from jobs.reliability.rate import Rate
from nodes.models import RackPlace, RackTemperature

WINDOW = timedelta(days=90)
HOUR = timedelta(hours=1)
BAND_C = 2
MAX_BANDS = 12
"""Of measured and of estimated temperatures; outer bands are joined."""
MAX_FAILURES = 5_000
MAX_PAIRS = 200
"""Racks and hours in one query."""
RackAndHour = tuple[str, datetime]


class BandKey(NamedTuple):
    """A band of temperatures, by its number from 0 °C on."""

    is_estimate: bool
    number: int


@dataclass(frozen=True)
class TemperatureBand:
    """Failures while the inlet was from `low_c` to below `high_c`, and the node-days of that."""

    low_c: int
    high_c: int
    is_estimate: bool
    rate: Rate

    def joined_with(self, other: TemperatureBand) -> TemperatureBand:
        rate = Rate(self.rate.failures + other.rate.failures, self.rate.node_days + other.rate.node_days)
        return TemperatureBand(min(self.low_c, other.low_c), max(self.high_c, other.high_c), self.is_estimate, rate)


def failures_by_inlet(now: datetime) -> list[TemperatureBand]:
    """Return bands of 2 °C in which any node was, from cold to warm: measured ones, then estimated ones.

    Only whole hours count. Of more failures than MAX_FAILURES the newest count, and the node-days since the oldest of
    them.
    """
    until = now.replace(minute=0, second=0, microsecond=0)
    since, failures = _failures(until - WINDOW, until)
    node_days = _node_days(since, until)
    by_band = _by_band(failures)
    bands = [
        TemperatureBand(
            BAND_C * key.number, BAND_C * (key.number + 1), key.is_estimate, Rate(by_band[key], node_days[key])
        )
        for key in sorted(node_days)
    ]
    return [
        *_few([band for band in bands if not band.is_estimate]),
        *_few([band for band in bands if band.is_estimate]),
    ]


def _failures(since: datetime, until: datetime) -> tuple[datetime, Counter[RackAndHour]]:
    """Return the failures by rack and hour, and from which hour on they are complete."""
    racks = dict(RackPlace.objects.values_list("node", "rack"))
    happened = Failure.objects.filter(
        at__gte=since, at__lt=until, day__gte=since.date(), cause__in=MACHINES, node__in=list(racks)
    )
    rows = list(happened.order_by("-at").values_list("node", "at")[: MAX_FAILURES + 1])
    if len(rows) > MAX_FAILURES:
        since = _hour(rows[-1][1]) + HOUR
    return since, Counter((racks[node], _hour(at)) for node, at in rows if at >= since)


def _node_days(since: datetime, until: datetime) -> dict[BandKey, float]:
    mean_c = ExpressionWrapper(F("sum_c") / F("count"), FloatField())
    rows = RackTemperature.objects.filter(hour__gte=since, hour__lt=until, count__gt=0).order_by()
    bands = rows.annotate(band=Floor(mean_c / float(BAND_C))).values_list("is_estimate", "band")
    return {BandKey(estimate, int(band)): nodes / 24 for estimate, band, nodes in bands.annotate(Sum("nodes"))}


def _by_band(failures: Counter[RackAndHour]) -> Counter[BandKey]:
    found: Counter[BandKey] = Counter()
    for pair, key in _bands_of(failures):
        found[key] += failures[pair]
    return found


def _bands_of(pairs: Iterable[RackAndHour]) -> Iterator[tuple[RackAndHour, BandKey]]:
    """Yield the band that each rack was in at each hour, as far as it is known."""
    rest = iter(pairs)
    while some := list(islice(rest, MAX_PAIRS)):
        any_of = Q(*(Q(rack=rack, hour=hour) for rack, hour in some), _connector=Q.OR)
        rows = RackTemperature.objects.filter(any_of, count__gt=0).order_by()
        for rack, hour, total, count, is_estimate in rows.values_list("rack", "hour", "sum_c", "count", "is_estimate"):
            yield (rack, hour), BandKey(is_estimate, math.floor(total / count / BAND_C))


def _few(bands: Sequence[TemperatureBand]) -> list[TemperatureBand]:
    """Join outer bands, those with fewer node-days first, until MAX_BANDS are left."""
    found = list(bands)
    while len(found) > MAX_BANDS:
        if found[0].rate.node_days <= found[-1].rate.node_days:
            found[:2] = [found[0].joined_with(found[1])]
        else:
            found[-2:] = [found[-2].joined_with(found[-1])]
    return found


def _hour(at: datetime) -> datetime:
    return at.replace(minute=0, second=0, microsecond=0)
