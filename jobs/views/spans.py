"""How far back a list goes, by its address: `?since=7d`."""

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


def since(asked: str) -> datetime | None:
    """None for what it does not understand, as for nothing."""
    days = whole(asked.removesuffix("d"), 10_000)
    return None if days is None else timezone.now() - timedelta(days=days)
