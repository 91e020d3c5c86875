"""What strangers sent, read as plain values: text from addresses and forms, and what jobs tell of themselves.

A job may write anything into its events and files, so nothing of it is used before one of these has read it. What is
not what it should be is nothing: None, or "" of text that is only shown. `training` has its own readers for lines of
a spool (training/reporting/lines.py), as it stands alone.
"""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime

COUNTED = 2**53  # of steps, samples and bytes: what JSON's readers count exactly
COLUMN = 2**31  # what a database's smallest whole-number column holds
COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")  # of git, by SHA-1 or SHA-256
_UNSTORABLE = re.compile("[\0\ud800-\udfff]")
END_OF_TIME = 2**33  # in Unix seconds: the year 2242
LONGEST = 366 * 86_400.0  # seconds: no write, round or step takes longer than a year


def whole(text: str | None, below: int = 2**63) -> int | None:
    """The number that the text writes in ASCII digits, if it fits a column; else None."""
    if not text or len(text) > 19 or not (text.isascii() and text.isdigit()):
        return None
    number = int(text)
    return number if number < below else None


def plain(text: str) -> str:
    """The text without NUL and halves of surrogate pairs, which no text column takes."""
    return _UNSTORABLE.sub("", text)


def count(value: object, below: int = COUNTED) -> int | None:
    """A whole number from 0 on; true and false are none."""
    return value if type(value) is int and 0 <= value < below else None


def number(value: object, most: float = 1e12) -> float | None:
    """A finite number from 0 to `most`; true and false are none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        return None
    return float(value) if math.isfinite(value) else None


def share(value: object) -> float | None:
    """A part of a whole: from 0 to 1."""
    return number(value, 1)


def duration(value: object) -> float | None:
    """Return a duration in seconds, from 0 to a year."""
    return number(value, LONGEST)


def line(value: object, most: int = 300) -> str:
    """Text for one line of a page: no line breaks, no control characters, nothing that turns the direction."""
    if not isinstance(value, str):
        return ""
    cut = value[:most]
    return cut if cut.isprintable() else "".join(letter for letter in cut if letter.isprintable())


def name(value: object, most: int = 300) -> str:
    """Text that names something: printable and no longer than `most`, or nothing, as half a name names another."""
    return value if isinstance(value, str) and len(value) <= most and value.isprintable() else ""


def matching(pattern: re.Pattern[str], value: object) -> str | None:
    """Text that is all of the pattern's."""
    return value if isinstance(value, str) and pattern.fullmatch(value) else None


def moment(value: object) -> datetime | None:
    """A time given in Unix seconds."""
    seconds = number(value, END_OF_TIME)
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
