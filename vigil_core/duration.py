"""Parse and write durations as people and rules write them: 30s, 5m, 1h, 7d."""

from __future__ import annotations

import re

UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
LONGEST_S = 366 * 86_400
_DURATION = re.compile(r"([0-9]{1,8})([smhd])")


def parse(value: object) -> int:
    """Return the seconds of "30s", "5m", "1h" or "7d", at most a year. Raises ValueError."""
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f'{value!r:.40} is not a duration: write "30s", "5m", "1h" or "7d"')
    seconds = int(found[1]) * UNITS[found[2]]
    if seconds > LONGEST_S:
        raise ValueError(f"{value} is longer than a year")
    return seconds


def write(seconds: float) -> str:
    """Return the shortest way to write whole seconds: 90s, 5m, 2h, 7d."""
    whole = round(seconds)
    for unit in ("d", "h", "m"):
        if whole and whole % UNITS[unit] == 0:
            return f"{whole // UNITS[unit]}{unit}"
    return f"{whole}s"
