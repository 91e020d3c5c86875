"""Draw the inlet temperatures of racks over a day on one scale, and say when they are coolest and warmest. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from statistics import mean

import numpy as np

from portal import drawing

WIDTH, HEIGHT = 84.0, 20.0
MIN_SPAN_C = 4.0
"""So that a tenth of a degree does not look like a heat wave."""
HOURS_A_DAY, MIN_DAYS = 24, 3
MIN_APART_C = 0.5
"""Hours of the day that differ by less are alike."""
Hours = Sequence[tuple[datetime, float]]


def scale(racks: Mapping[str, Hours]) -> tuple[float, float]:
    """Return the lowest and highest temperature to draw for all racks, at least MIN_SPAN_C apart."""
    values = [celsius for hours in racks.values() for _, celsius in hours]
    if not values:
        return 0.0, MIN_SPAN_C
    low, high = min(values), max(values)
    missing = max(0.0, MIN_SPAN_C - (high - low)) / 2
    return low - missing, high + missing


def polyline(hours: Hours, start: datetime, end: datetime, low: float, high: float) -> str:
    """Return the points of an SVG polyline, 84 × 20, from `start` to `end`; "" if there are fewer than two hours."""
    if len(hours) < 2:
        return ""
    x = np.array([(at - start) / (end - start) for at, _ in hours])
    y = (np.array([celsius for _, celsius in hours]) - low) / (high - low)
    return drawing.polyline(x, y, WIDTH, HEIGHT, margin=1)


@dataclass(frozen=True)
class DailyPattern:
    """The hours of the day in which racks are coolest and warmest, how far they are apart, and of how many days."""

    coolest: int
    warmest: int
    apart_c: float
    days: int


def daily_pattern(racks: Mapping[str, Hours]) -> DailyPattern | None:
    """Return the pattern over the racks of which every hour of the day is known on MIN_DAYS days; None without one.

    Each rack counts by how its hours differ from its own mean: a warm rack shifts no hour. `racks` are in the time zone
    of the reader.
    """
    differences: defaultdict[int, list[float]] = defaultdict(list)
    days = 0
    for hours in racks.values():
        by_hour: defaultdict[int, list[float]] = defaultdict(list)
        for at, celsius in hours:
            by_hour[at.hour].append(celsius)
        if len(by_hour) < HOURS_A_DAY or min(map(len, by_hour.values())) < MIN_DAYS:
            continue
        days = max(days, len(hours) // HOURS_A_DAY)
        means = {hour: mean(values) for hour, values in by_hour.items()}
        middle = mean(means.values())
        for hour, celsius in means.items():
            differences[hour].append(celsius - middle)
    if not differences:
        return None
    typical = {hour: mean(values) for hour, values in differences.items()}
    coolest, warmest = min(typical, key=lambda hour: typical[hour]), max(typical, key=lambda hour: typical[hour])
    apart_c = typical[warmest] - typical[coolest]
    return DailyPattern(coolest, warmest, apart_c, days) if apart_c >= MIN_APART_C else None
