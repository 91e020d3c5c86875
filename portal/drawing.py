"""Write the points of curves in SVG drawings."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def polyline(
    x: NDArray[np.float64], y: NDArray[np.float64], width: float, height: float, *, margin: float = 0.0
) -> str:
    """Return the points of an SVG polyline from fractions of its width and, upwards, of its height.

    What lies outside of 0 to 1 is drawn on the edge; `margin` is left free above and below, for the width of the line.
    """
    xs = np.clip(x, 0, 1) * width
    ys = height - margin - np.clip(y, 0, 1) * (height - 2 * margin)
    return " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(xs, ys, strict=True))
