"""A line of the loss as small as a word, for lists."""

from __future__ import annotations

import numpy as np

from portal.series.read import curve

WIDTH, HEIGHT, POINTS = 84.0, 20.0, 42


def sparks(attempt_ids: list[int], name: str = "loss") -> dict[int, str]:
    """{attempt: the points of an SVG polyline, 84 × 20}; attempts without values are missing."""
    found = {attempt_id: _points(attempt_id, name) for attempt_id in attempt_ids}
    return {attempt_id: points for attempt_id, points in found.items() if points}


def _points(attempt_id: int, name: str) -> str:
    read = curve([("attempt", attempt_id)], name, points=POINTS)
    value = read.value if read.value is not None else read.mean
    if value is None:
        return ""
    finite = np.isfinite(value)
    step, value = read.step[finite].astype(float), value[finite]
    if len(step) < 2:
        return ""
    # The first steps fall so steeply that the rest would be a flat line: cut at the 95th percentile.
    low, high = float(value.min()), float(np.percentile(value, 95))
    x = (step - step[0]) / (step[-1] - step[0]) * WIDTH
    y = HEIGHT - 1 - np.clip((value - low) / ((high - low) or 1.0), 0, 1) * (HEIGHT - 2)
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
