"""Carry out a request once however often it is sent, and store the result durably before responding."""

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
    """Return what `make` creates for a request, or what the same request created before; and whether it is new.

    `make` is called in a transaction, with the name under which the request's code is stored, "" if it has none.
    """
    with durable():
        if (earlier := answered(user, route, key, body)) is not None:
            return model.objects.get(pk=earlier), False
        upload_name = upload.store(code) if code is not None else ""
        try:
            with transaction.atomic():
                made = make(upload_name)
                remember(user, route, key, body, made.pk)
        except IntegrityError:
            upload.delete(upload_name)
            if (earlier := answered(user, route, key, body)) is None:
                raise
            return model.objects.get(pk=earlier), False  # the same request came at once, and was through first
        except BaseException:
            upload.delete(upload_name)
            raise
    return made, True


def answered(user: User, route: str, key: str | None, body: str) -> int | None:
    """Return what the same request created within the last day, if this repeats one."""
    if not key:
        return None
    keys = IdempotencyKey.objects.filter(user=user, route=route, key=key)
    keys.filter(created_at__lt=timezone.now() - IdempotencyKey.LIFE).delete()
    row = keys.first()
    if row is not None and row.body_digest != body:
        raise IdempotencyConflict
    return row.thing_id if row is not None else None


def remember(user: User, route: str, key: str | None, body: str, thing_id: int) -> None:
    if key:
        IdempotencyKey.objects.create(user=user, route=route, key=key, body_digest=body, thing_id=thing_id)


@contextmanager
def durable() -> Iterator[None]:
    """Make commits durable on SQLite before a person hears of them (intake's last second is in the spools anyway)."""
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
