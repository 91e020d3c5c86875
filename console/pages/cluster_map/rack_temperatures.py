"""Gather what the racks page shows about inlet temperatures: now, over a day, and failures by temperature."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.core.cache import cache
from django.utils import timezone

from jobs.failures import temperatures as failures
from jobs.failures.sentences import per_thousand
from nodes.models import Assessment
from nodes.monitoring.temperatures import hourly, racks_in_order
from nodes.presenting import temperatures as drawing
from portal.access import sees_all
from portal.models import User
from vigil_core import formatting

DAY, PATTERN = timedelta(hours=24), timedelta(days=14)
WARM_C = 2.0
TOO_FEW = "too few failures to say"
CACHE_S = 3600
"""How long what only changes with the hour is stored: it is read from months of hours of all racks."""


@dataclass(frozen=True)
class RackRow:
    """A rack's inlet now and over the last 24 hours."""

    rack: str
    inlet_c: float | None
    above_c: float | None
    is_estimate: bool
    nodes: int
    line: str
    low_c: float | None
    high_c: float | None
    is_line_estimate: bool
    """Whether an hour of the line is estimated."""

    @property
    def is_warm(self) -> bool:
        return self.above_c is not None and self.above_c >= WARM_C


def context(user: User, now: datetime | None = None) -> dict[str, Any]:
    """Return the template's values; `inlets` is empty until a rack's temperature is known.

    Failures are everybody's, so they are only for people who see everybody's numbers.
    """
    now = now or timezone.now()
    current = {row.item: row.fields for row in Assessment.objects.fresh(now).filter(signal="rack_inlet")}
    day = hourly(DAY, now)
    if not current and not day:
        return {"inlets": []}
    recent = {rack: [(hour.hour, hour.celsius) for hour in hours] for rack, hours in day.items()}
    low, high = drawing.scale(recent)
    rows = []
    for rack, _ in racks_in_order():
        fields, hours = current.get(rack, {}), recent.get(rack, [])
        if fields.get("inlet_c") is None and not hours:
            continue
        values = [celsius for _, celsius in hours]
        rows.append(
            RackRow(
                rack,
                fields.get("inlet_c"),
                fields.get("above_neighbours_c"),
                fields.get("is_estimate", True) is not False,
                fields.get("nodes", 0),
                drawing.polyline(hours, now - DAY, now, low, high),
                min(values, default=None),
                max(values, default=None),
                any(hour.is_estimate for hour in day.get(rack, [])),
            )
        )
    return {"inlets": rows, "daily": _daily(now), "bands": _bands(now) if sees_all(user) else []}


def _daily(now: datetime) -> str:
    """Return when racks are coolest and warmest over the day, measured or else estimated; "" if that is not known."""
    hour = now.replace(minute=0, second=0, microsecond=0)
    key = f"racks-daily:{timezone.get_current_timezone_name()}:{hour.timestamp():.0f}"
    return str(cache.get_or_set(key, lambda: _daily_text(hour), CACHE_S))


def _daily_text(until: datetime) -> str:
    racks = hourly(PATTERN, until)
    for is_estimate in (False, True):
        pattern = drawing.daily_pattern(
            {
                rack: [
                    (timezone.localtime(hour.hour), hour.celsius)
                    for hour in hours
                    if hour.is_estimate == is_estimate and hour.hour < until
                ]
                for rack, hours in racks.items()
            }
        )
        if pattern is not None:
            return (
                f"Over a day the racks are coolest at {pattern.coolest:02}:00 and warmest at {pattern.warmest:02}:00,"
                f" {pattern.apart_c:.1f} °C apart, on average of {pattern.days} days"
                f"{' by estimates' if is_estimate else ''}."
            )
    return ""


class BandRow(NamedTuple):
    """Describes failures at an inlet temperature; `rate`: per 1,000 node-days with its interval."""

    inlet: str
    is_estimate: bool
    failures: int
    rate: str
    node_days: float


def _bands(now: datetime) -> list[BandRow]:
    hour = now.replace(minute=0, second=0, microsecond=0)
    key = f"racks-bands:{hour.timestamp():.0f}"
    found: list[BandRow] | None = cache.get(key)
    if found is None:
        found = [_band_row(band) for band in failures.failures_by_inlet(hour)]
        cache.set(key, found, CACHE_S)
    return found


def _band_row(band: failures.TemperatureBand) -> BandRow:
    often, ends = per_thousand(band.rate)
    text = TOO_FEW if band.rate.is_few else f"{often} ({ends})"
    inlet = f"{band.low_c} to {band.high_c}{formatting.NBSP}°C"
    return BandRow(inlet, band.is_estimate, band.rate.failures, text, band.rate.node_days)
