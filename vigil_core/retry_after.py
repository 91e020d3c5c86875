"""Parse the Retry-After header of a response (RFC 9110, 10.2.3) into seconds."""

from __future__ import annotations

import time
from contextlib import suppress
from email.utils import parsedate_to_datetime


def seconds_of(value: str) -> float | None:
    """Return the seconds to wait, from a header with seconds or with a date; None if it cannot be parsed."""
    value = value.strip()
    if value.isascii() and value.isdecimal() and len(value) < 10:
        return float(value)
    with suppress(ValueError, TypeError, OverflowError):
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    return None
