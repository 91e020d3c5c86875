"""Read untrusted input as plain values: text from URLs and forms, and what jobs report.

A job may write anything into its events and files, so none of it is used before one of these functions has read it.
Invalid input becomes None, or "" for text that is only shown. `training` has its own readers for lines of a spool
(training/reporting/lines.py), as it stands alone.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from typing import Any

MAX_COUNT = 2**53  # of steps, samples and bytes: JSON parsers represent integers exactly up to here
MAX_INTEGER = 2**31  # a 32-bit integer column holds less
COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")  # a git commit id, SHA-1 or SHA-256
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
MAX_UNIX_TIME = 2**33  # in Unix seconds: the year 2242
MAX_DURATION_S = 366 * 86_400.0  # seconds: no write, round or step takes longer than a year


def whole(text: str | None, below: int = 2**63) -> int | None:
    """Return the number that the text writes in ASCII digits, if it fits a column; else None."""
    if not text or len(text) > 19 or not (text.isascii() and text.isdigit()):
        return None
    number = int(text)
    return number if number < below else None


def plain(text: str) -> str:
    """Return the text without NUL and lone surrogates, which no text column accepts."""
    return _UNSTORABLE.sub("", text)


def count(value: object, below: int = MAX_COUNT) -> int | None:
    """Return a whole number from 0 on; booleans are refused."""
    return value if type(value) is int and 0 <= value < below else None


def number(value: object, most: float = 1e12) -> float | None:
    """Return a finite number from 0 to `most`; booleans are refused."""
    return within(value, 0, most)


def within(value: object, least: float, most: float) -> float | None:
    """Return a finite number from `least` to `most`; booleans are refused."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        return None
    return float(value) if math.isfinite(value) else None


def tables(value: object) -> list[dict[str, Any]]:
    """Return the tables of a list, without anything else in it; [] if it is no list."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def share(value: object) -> float | None:
    """Return a fraction from 0 to 1."""
    return number(value, 1)


def duration(value: object) -> float | None:
    """Return a duration in seconds, from 0 to a year."""
    return number(value, MAX_DURATION_S)


def line(value: object, most: int = 300) -> str:
    """Return text for one line of a page: no line breaks, control characters or direction changes."""
    if not isinstance(value, str):
        return ""
    cut = value[:most]
    return cut if cut.isprintable() else "".join(letter for letter in cut if letter.isprintable())


def name(value: object, most: int = 300) -> str:
    """Return a printable name no longer than `most`, or "": a truncated name would be another name."""
    return value if isinstance(value, str) and len(value) <= most and value.isprintable() else ""


def matching(pattern: re.Pattern[str], value: object) -> str | None:
    """Return text that matches the whole pattern."""
    return value if isinstance(value, str) and pattern.fullmatch(value) else None


def moment(value: object) -> datetime | None:
    """Return the time given in Unix seconds."""
    seconds = number(value, MAX_UNIX_TIME)
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
