"""Read values of forms as browsers send them."""

from __future__ import annotations

from datetime import datetime

from django.http import HttpRequest
from django.utils import timezone

from nodes.cluster.drain import MAX_REASON
from vigil_core.untrusted import plain


class BadReason(ValueError):
    """Raised if a form has no reason, or a longer one than is stored."""


def moment(text: str) -> datetime:
    """Return the time of an `<input type="datetime-local">`, in the site's time zone. Raises ValueError."""
    try:
        return timezone.make_aware(datetime.strptime(text[:16], "%Y-%m-%dT%H:%M"))
    except OverflowError as error:  # a year that no time zone reaches
        raise ValueError(str(error)) from None


def line(request: HttpRequest, name: str) -> str:
    """Return a posted text as one printable line, with single spaces; "" if it is missing."""
    return " ".join(plain(request.POST.get(name, "")).split())


def reason(request: HttpRequest) -> str:
    """Return the reason of an order or a decision as one line; raise BadReason if it is missing or too long."""
    text = line(request, "reason")
    if not text or len(text) > MAX_REASON:
        raise BadReason(f"Enter a reason of at most {MAX_REASON} characters.")
    return text
