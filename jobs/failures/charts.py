"""Draw reliability charts: the failure rate by week, and useful time by save interval. In per cent and pixels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from jobs.failures.report import FailureRow
from jobs.reliability.forecast import Forecast
from jobs.reliability.published import PUBLISHED, PublishedRate
from vigil_core import formatting

HEIGHT, TOP = 150.0, 8.0
MAX_LABELS = 8
MIN_SHARE_OF_MEDIAN = 0.25  # of the node-days of a week, if it sets the scale
MIN_LABEL_DISTANCE = 13.0  # pixels between two stacked labels
_Place = Callable[[float], float]
_PERIODS = (1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 4 * 3600, 12 * 3600, 86400, 3 * 86400, 10 * 86400)


@dataclass(frozen=True)
class WeekMark:
    """A week's rate with its interval; `y` is in pixels from the top.

    `is_cut` means that the interval exceeds the scale.
    """

    x: float
    y: float
    low: float
    high: float
    title: str
    label: str
    is_cut: bool = False


@dataclass(frozen=True)
class PublishedLine:
    """A published rate. `text_y` is the position of its label, moved away from its neighbours'."""

    y: float
    text_y: float
    name: str
    title: str


@dataclass(frozen=True)
class Weeks:
    marks: list[WeekMark]
    lines: list[PublishedLine]
    scale: list[tuple[float, str]]
    alternative: str


def weeks(rows: Sequence[FailureRow]) -> Weeks | None:
    """Draw the rate by week; None if no nodes were allocated."""
    used = [(place, row) for place, row in enumerate(rows) if row.rate.node_days]
    if not used:
        return None
    rates = [row.rate.per_thousand or 0.0 for _, row in used]
    most = _top([row for _, row in used])

    def y(value: float) -> float:
        return round(TOP + HEIGHT * (1 - min(1.0, value / most)), 1)

    each = max(1, math.ceil(len(rows) / MAX_LABELS))
    marks = []
    for place, row in used:
        low, high = row.rate.per_thousand_interval or (0.0, 0.0)
        day = f"{row.since.day}{formatting.NBSP}{row.since:%b}" if row.since else row.name
        node_days = f"{formatting.measure(row.rate.node_days)} node-days"
        rate = f"{formatting.measure(row.rate.per_thousand)} per 1,000"
        ends = f"{formatting.measure(low)} to {formatting.measure(high)}"
        title = f"Week of {day}: {formatting.plural(row.rate.failures, 'failure')} in {node_days}, {rate} ({ends})"
        label = day if (len(rows) - 1 - place) % each == 0 else ""
        x = round(100 * (place + 0.5) / len(rows), 3)
        marks.append(WeekMark(x, y(row.rate.per_thousand or 0.0), y(low), y(high), title, label, high > most))
    newest_rates = ", ".join(f"{formatting.measure(rate)}" for rate in rates[-12:])
    return Weeks(
        marks, _lines(y, most), _scale(y, most), f"Failures per 1,000 node-days by week, the last: {newest_rates}."
    )


def _top(rows: Sequence[FailureRow]) -> float:
    """Return the rate at the upper end of the scale, leaving room for the intervals of weeks with enough node time.

    A week that has just begun may have any rate and a huge interval, which would flatten all others.
    """
    enough = median(row.rate.node_days for row in rows) * MIN_SHARE_OF_MEDIAN
    ends = [(row.rate.per_thousand_interval or (0.0, 0.0))[1] for row in rows if row.rate.node_days >= enough]
    return max(1.05 * max(ends), 1.25 * max(1.0, *(rate.per_thousand for rate in PUBLISHED[1:])))


def _lines(y: _Place, most: float) -> list[PublishedLine]:
    """Return the published rates within the scale, highest first.

    Their labels neither overlap nor leave the chart.
    """
    shown = sorted((rate for rate in PUBLISHED if rate.per_thousand <= most), key=lambda rate: -rate.per_thousand)
    texts = [y(rate.per_thousand) + 4 for rate in shown]
    for place in range(1, len(texts)):
        texts[place] = max(texts[place], texts[place - 1] + MIN_LABEL_DISTANCE)
    for place in range(len(texts) - 1, -1, -1):
        lowest = texts[place + 1] - MIN_LABEL_DISTANCE if place + 1 < len(texts) else TOP + HEIGHT
        texts[place] = round(min(texts[place], lowest), 1)
    return [_line(rate, y(rate.per_thousand), text) for rate, text in zip(shown, texts, strict=True)]


def _line(rate: PublishedRate, at: float, text: float) -> PublishedLine:
    title = f"{rate.name}, {formatting.measure(rate.per_thousand)} per 1,000 node-days: {rate.basis} ({rate.source})"
    return PublishedLine(at, text, f"{rate.name} {formatting.measure(rate.per_thousand)}", title)


def _scale(y: _Place, most: float) -> list[tuple[float, str]]:
    step = _round_step(most)
    return [(y(n * step), f"{n * step:,g}") for n in range(int(most / step) + 1)]


def _round_step(length: float) -> float:
    """Return 1, 2 or 5 times a power of ten, such that two to six steps fit into the length."""
    step = 10.0 ** math.floor(math.log10(length))
    return step / 2 if length / step < 2.5 else step * 2 if length / step > 6 else step


@dataclass(frozen=True)
class SaveCurve:
    """Useful time by save interval. `line` holds points of 100 × 100; x is in per cent, y in pixels."""

    line: str
    best_x: float
    best_y: float
    young_x: float
    ticks: list[tuple[float, str]]
    scale: list[tuple[float, str]]
    alternative: str


def curve(found: Forecast) -> SaveCurve | None:
    """Draw useful time by save interval; None if no interval leaves any."""
    points = [(period, effective) for period, effective in found.curve() if effective > 0]
    if len(points) < 2:
        return None
    first, last = math.log(points[0][0]), math.log(points[-1][0])
    top = max(effective for _, effective in points)
    low = min(min(effective for _, effective in points), top * 0.9)
    low = max(low, 2 * top - 1.6, 0.0) if top > 0.8 else 0.0
    high = min(1.0, top + 0.08 * (top - low) + 1e-6)

    def x(period: float) -> float:
        return round(100 * (math.log(period) - first) / (last - first), 3)

    def y(effective: float) -> float:
        return round(100 * (1 - (max(effective, low) - low) / (high - low)), 3)

    line = " ".join(f"{x(period)},{y(effective)}" for period, effective in points)
    ticks = [(x(p), formatting.rough(p)) for p in _PERIODS if points[0][0] <= p <= points[-1][0]]
    step = _round_step(high - low)
    shares = [n * step for n in range(math.ceil(low / step), int(high / step) + 1)]
    scale = [(_pixels(y(share)), f"{100 * share:g}{formatting.NBSP}%") for share in shares if low < share < high]
    young = min(max(found.young_seconds, points[0][0]), points[-1][0])
    best = formatting.duration(found.best_seconds)
    alternative = f"Useful time by save interval: at most {formatting.percent(found.best_useful_share)}, every {best}."
    top_x, top_y = x(found.best_seconds), _pixels(y(found.best_useful_share))
    return SaveCurve(line, top_x, top_y, x(young), _thinned(ticks), scale, alternative)


def _pixels(y: float) -> float:
    return round(TOP + HEIGHT * y / 100, 1)


def _thinned(ticks: list[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return the ticks whose labels have room; labels at the ends would hang over."""
    shown: list[tuple[float, str]] = []
    for at, label in ticks:
        if 3 <= at <= 95 and (not shown or at - shown[-1][0] >= 9):
            shown.append((at, label))
    return shown
