"""Read values of an attempt's `latest` metrics, as rows of the database store them."""

from __future__ import annotations

import math
from typing import Any


def number(values: dict[str, Any], name: str) -> float | None:
    """Return a value of `latest` as a float; NaN and infinities are stored as words there."""
    value = values.get(name)
    if isinstance(value, str):
        return {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}.get(value)
    return float(value) if isinstance(value, int | float) else None
