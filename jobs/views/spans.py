"""Parse how far back a list goes: `?since=7d`."""

from __future__ import annotations

from datetime import datetime, timedelta

from django.utils import timezone

from vigil_core.untrusted import whole

SPANS = (
    ("", "Any time"),
    ("1d", "Last 24 hours"),
    ("7d", "Last 7 days"),
    ("30d", "Last 30 days"),
    ("365d", "Last year"),
)


def since(text: str) -> datetime | None:
    """Return the start of the span; None if the text is empty or invalid."""
    days = whole(text.removesuffix("d"), 10_000)
    return None if days is None else timezone.now() - timedelta(days=days)
