"""Read the sparklines of attempts from their series."""

from __future__ import annotations

from jobs.presenting.sparklines import POINTS, points
from portal.series.read import curve


def sparks(attempt_ids: list[int], name: str = "loss") -> dict[int, str]:
    """Return the points of an SVG polyline, 84 × 20, by attempt id; attempts without values are missing."""
    curves = {attempt_id: curve([("attempt", attempt_id)], name, points=POINTS) for attempt_id in attempt_ids}
    found = {
        attempt_id: points(read.step, read.value if read.value is not None else read.mean)
        for attempt_id, read in curves.items()
    }
    return {attempt_id: drawn for attempt_id, drawn in found.items() if drawn}
