"""What a request did is done once, however often it is sent, and is on disk before anybody hears of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from django.db import connection
from django.utils import timezone

from jobs.errors import IdempotencyConflict
from portal.models import IdempotencyKey, User


def answered(user: User, route: str, key: str | None, body: str) -> int | None:
    """What the same request made within the last day, if this repeats one."""
    if not key:
        return None
    known = IdempotencyKey.objects.filter(user=user, route=route, key=key)
    known.filter(created_at__lt=timezone.now() - IdempotencyKey.LIFE).delete()
    row = known.first()
    if row is not None and row.body_digest != body:
        raise IdempotencyConflict
    return row.thing_id if row is not None else None


def remember(user: User, route: str, key: str | None, body: str, thing_id: int) -> None:
    if key:
        IdempotencyKey.objects.create(user=user, route=route, key=key, body_digest=body, thing_id=thing_id)


@contextmanager
def durable() -> Iterator[None]:
    """What a person was told is on disk: SQLite syncs these commits (intake's last second is in the spools)."""
    if connection.vendor != "sqlite" or connection.in_atomic_block:
        yield
        return
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA synchronous=FULL")
    try:
        yield
    finally:
        with connection.cursor() as cursor:
            cursor.execute("PRAGMA synchronous=NORMAL")
