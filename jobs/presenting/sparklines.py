"""Draw word-sized loss curves for lists."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from portal.drawing import polyline

WIDTH, HEIGHT, POINTS = 84.0, 20.0, 42


def points(step: NDArray[np.int64], value: NDArray[np.float64] | None) -> str:
    """Return the points of an SVG polyline, 84 × 20; "" if there are fewer than two values."""
    if value is None:
        return ""
    finite = np.isfinite(value)
    step, value = step[finite].astype(float), value[finite]
    if len(step) < 2:
        return ""
    # The first steps fall so steeply that the rest would be a flat line: cut at the 95th percentile.
    low, high = float(value.min()), float(np.percentile(value, 95))
    x, y = (step - step[0]) / (step[-1] - step[0]), (value - low) / ((high - low) or 1.0)
    return polyline(x, y, WIDTH, HEIGHT, margin=1)
