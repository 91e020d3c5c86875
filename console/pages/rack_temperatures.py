"""Gather what the racks page shows about inlet temperatures: now, over a day, and failures by temperature."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone

from jobs.failures import temperatures as failures
from jobs.failures.sentences import per_thousand
from nodes.models import Assessment, RackTemperature
from nodes.monitoring.temperatures import hourly, racks_in_order
from nodes.presenting import temperatures as drawing
from portal.access import sees_all
from portal.models import User
from vigil_core import formatting

DAY, PATTERN = timedelta(hours=24), timedelta(days=14)
WARM_C = 2.0
TOO_FEW = "too few failures to say"


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

    @property
    def is_warm(self) -> bool:
        return self.above_c is not None and self.above_c >= WARM_C


def context(user: User, now: datetime | None = None) -> dict[str, Any]:
    """Return the template's values; `inlets` is empty until a rack's temperature is known.

    Failures are everybody's, so they are only for people who see everybody's numbers.
    """
    now = now or timezone.now()
    current = {row.item: row.fields for row in Assessment.objects.fresh(now).filter(signal="rack_inlet")}
    days = hourly(PATTERN, now)
    if not current and not days:
        return {"inlets": []}
    recent = {rack: [(row.hour, row.mean_c) for row in rows if row.hour > now - DAY] for rack, rows in days.items()}
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
            )
        )
    return {"inlets": rows, "daily": _daily(days), "bands": _bands(now) if sees_all(user) else []}


def _daily(days: dict[str, list[RackTemperature]]) -> str:
    """Return when racks are coolest and warmest on average over the last two weeks."""
    hours = [(timezone.localtime(row.hour), row.mean_c) for rows in days.values() for row in rows]
    found = drawing.daily_pattern(hours)
    if found is None:
        return ""
    (coolest, cool_c), (warmest, warm_c) = found
    return (
        f"Over a day the racks are coolest at {coolest:02}:00 ({cool_c:.1f} °C) and warmest at {warmest:02}:00"
        f" ({warm_c:.1f} °C), on average of two weeks."
    )


def _bands(now: datetime) -> list[tuple[str, int, str, float]]:
    """Return rows of (temperatures, failures, rate per 1,000 node-days with its interval, node-days)."""
    rows = []
    for band in failures.failures_by_inlet(now):
        often, ends = per_thousand(band.rate)
        text = TOO_FEW if band.rate.is_few else f"{often} ({ends})"
        rows.append(
            (f"{band.low_c} to {band.high_c}{formatting.NBSP}°C", band.rate.failures, text, band.rate.node_days)
        )
    return rows
