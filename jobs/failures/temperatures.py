"""Count machine failures by the inlet temperature of the rack at that time, with exact Poisson intervals.

Exposure is the time that the rack's nodes were at that temperature, whether jobs ran there or not. A band in which less
than FEW failures happened says nothing alone: its rate has an interval all the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from datetime import datetime, timedelta

from jobs.failures.kinds import MACHINES
from jobs.models import Failure
from jobs.reliability.rate import Rate
from nodes.models import RackPlace, RackTemperature

WINDOW = timedelta(days=90)
BAND_C = 2
MOST_BANDS = 12
MOST_FAILURES = 20_000


@dataclass(frozen=True)
class TemperatureBand:
    """Failures while the inlet was from `low_c` to below `high_c`, and the node-days of that."""

    low_c: int
    high_c: int
    rate: Rate


def failures_by_inlet(now: datetime) -> list[TemperatureBand]:
    """Return bands of 2 °C from cold to warm, those in which any node was."""
    node_days: defaultdict[int, float] = defaultdict(float)
    bands: dict[tuple[str, datetime], int] = {}
    rows = RackTemperature.objects.filter(hour__gt=now - WINDOW, count__gt=0).order_by()
    for rack, hour, total, count, nodes in rows.values_list("rack", "hour", "sum_c", "count", "nodes").iterator():
        band = bands[rack, hour] = BAND_C * math.floor(total / count / BAND_C)
        node_days[band] += nodes / 24
    if not bands:
        return []
    racks = dict(RackPlace.objects.values_list("node", "rack"))
    failures: defaultdict[int, int] = defaultdict(int)
    happened = Failure.objects.filter(at__gt=now - WINDOW, cause__in=MACHINES, node__in=list(racks)).order_by("-at")
    for node, at in happened.values_list("node", "at")[:MOST_FAILURES]:
        key = racks[node], at.replace(minute=0, second=0, microsecond=0)
        if key in bands:
            failures[bands[key]] += 1
    return [
        TemperatureBand(band, band + BAND_C, Rate(failures[band], node_days[band]))
        for band in sorted(node_days)[:MOST_BANDS]
    ]
