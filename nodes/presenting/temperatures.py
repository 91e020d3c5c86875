"""Draw the inlet temperatures of racks over a day on one scale, and say when they are coolest and warmest. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from statistics import mean

WIDTH, HEIGHT = 84.0, 20.0
LEAST_SPAN_C = 4.0
"""So that a tenth of a degree does not look like a heat wave."""
LEAST_HOURS = 6
Hours = Sequence[tuple[datetime, float]]


def scale(racks: Mapping[str, Hours]) -> tuple[float, float]:
    """Return the lowest and highest temperature to draw for all racks, at least LEAST_SPAN_C apart."""
    values = [celsius for hours in racks.values() for _, celsius in hours]
    if not values:
        return 0.0, LEAST_SPAN_C
    low, high = min(values), max(values)
    missing = max(0.0, LEAST_SPAN_C - (high - low)) / 2
    return low - missing, high + missing


def polyline(hours: Hours, start: datetime, end: datetime, low: float, high: float) -> str:
    """Return the points of an SVG polyline, 84 × 20, from `start` to `end`; "" if there are fewer than two hours."""
    if len(hours) < 2:
        return ""
    span = (end - start).total_seconds()
    points = []
    for at, celsius in hours:
        x = min(1.0, max(0.0, (at - start).total_seconds() / span)) * WIDTH
        y = HEIGHT - 1 - (celsius - low) / (high - low) * (HEIGHT - 2)
        points.append(f"{x:.1f},{y:.1f}")
    return " ".join(points)


def daily_pattern(hours: Hours) -> tuple[tuple[int, float], tuple[int, float]] | None:
    """Return the coolest and the warmest hour of the day with their mean temperatures; None if too few are known.

    `hours` are in the time zone of the reader.
    """
    by_hour: defaultdict[int, list[float]] = defaultdict(list)
    for at, celsius in hours:
        by_hour[at.hour].append(celsius)
    if len(by_hour) < LEAST_HOURS:
        return None
    means = {hour: mean(values) for hour, values in by_hour.items()}
    coolest, warmest = min(means, key=lambda hour: means[hour]), max(means, key=lambda hour: means[hour])
    return (coolest, means[coolest]), (warmest, means[warmest])
