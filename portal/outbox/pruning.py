"""Prune the outbox: old rows, and waiting messages of paused channels."""

from __future__ import annotations

from datetime import timedelta

from django.utils import timezone

from portal.models import Channel, Delivery

RETENTION = timedelta(days=30)
ROWS_PER_DELETE = 5_000  # rows at once, so that nobody waits long for the database


def remove_old() -> int:
    """Remove messages made long ago, whatever their outcome; return how many rows."""
    count = 0
    while True:
        old = Delivery.objects.filter(created_at__lt=timezone.now() - RETENTION).order_by("created_at")
        keys = list(old.values_list("pk", flat=True)[:ROWS_PER_DELETE])
        count += Delivery.objects.filter(pk__in=keys).delete()[0]
        if len(keys) < ROWS_PER_DELETE:
            return count


def drop_unsent(channel: Channel, why: str) -> int:
    return channel.deliveries.unsent().update(state=Delivery.State.DROPPED, error=why[:300])
