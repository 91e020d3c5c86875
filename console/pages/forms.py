"""Read values of forms as browsers send them."""

from __future__ import annotations

from datetime import datetime

from django.http import HttpRequest
from django.utils import timezone

from vigil_core.untrusted import plain

MOST_DIGITS = 9


def moment(text: str) -> datetime:
    """Return the time of an `<input type="datetime-local">`, in the site's time zone. Raises ValueError."""
    try:
        return timezone.make_aware(datetime.strptime(text[:16], "%Y-%m-%dT%H:%M"))
    except OverflowError as error:  # a year that no time zone reaches
        raise ValueError(str(error)) from None


def whole(text: str) -> int | None:
    """Return a whole number from 0 on; None for any other text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS else None


def line(request: HttpRequest, name: str) -> str:
    """Return a posted text as one printable line, with single spaces; "" if it is missing."""
    return " ".join(plain(request.POST.get(name, "")).split())
