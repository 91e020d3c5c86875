"""What a request did is done once, however often it is sent, and is on disk before anybody hears of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from django.db import IntegrityError, connection, transaction
from django.utils import timezone

from jobs.disk import upload
from jobs.errors import IdempotencyConflict
from jobs.models import Job, Sweep
from portal.models import IdempotencyKey, User

Thing = TypeVar("Thing", Job, Sweep)


def make_once(
    model: type[Thing],
    user: User,
    *,
    route: str,
    key: str | None,
    body: str,
    code: bytes | None,
    make: Callable[[str], Thing],
) -> tuple[Thing, bool]:
    """What `make` makes of a request, or what the same request made before; and whether it is new.

    `make` is called in a transaction, with the name under which the request's code is kept, "" where it brought none.
    """
    with durable():
        if (earlier := answered(user, route, key, body)) is not None:
            return model.objects.get(pk=earlier), False
        kept = upload.keep(code) if code is not None else ""
        try:
            with transaction.atomic():
                made = make(kept)
                remember(user, route, key, body, made.pk)
        except IntegrityError:
            upload.forget(kept)
            if (earlier := answered(user, route, key, body)) is None:
                raise
            return model.objects.get(pk=earlier), False  # the same request came at once, and was through first
        except BaseException:
            upload.forget(kept)
            raise
    return made, True


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
