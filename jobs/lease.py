"""Lease the right to follow in the database, on the database's clock, with a fence that every write checks.

A holder that was stopped (SIGSTOP, a long pause) past its lease finds on its next write that somebody else has
taken over: the fence in the row is no longer its own, its transaction is rolled back, and none of it is written.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from django.db import IntegrityError, transaction
from django.db.models import DateTimeField, ExpressionWrapper, F, Q
from django.db.models.expressions import Combinable
from django.db.models.functions import Now

from portal.models import Lease

SECONDS = 15


class LeaseLost(Exception):
    """Another process has the lease now. What was about to be written was not."""


def _from_now(seconds: float) -> Combinable:
    return ExpressionWrapper(Now() + timedelta(seconds=seconds), output_field=DateTimeField())


@dataclass(frozen=True)
class ActiveLease:
    """A lease that this process has, as long as the fence in the row is its own."""

    name: str
    holder: str
    fence: int

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Open a transaction that commits only if the lease is still ours, and renew the lease in it."""
        with transaction.atomic():
            row = Lease.objects.filter(name=self.name, holder=self.holder, fence=self.fence)
            if row.update(expires_at=_from_now(SECONDS)) != 1:
                raise LeaseLost(self.name)
            yield

    def check(self) -> None:
        """Renew the lease before a call to another system. Raise LeaseLost if it is not ours any more."""
        with self.writing():
            pass

    def release(self) -> None:
        """Give it back; the fence stays, so that a late write of ours still fails once another has taken it."""
        Lease.objects.filter(name=self.name, holder=self.holder, fence=self.fence).update(expires_at=Now())


def take(name: str, *, holder: str | None = None) -> ActiveLease | None:
    """Take the lease if it is free; never waits."""
    holder = holder or f"{socket.gethostname()[:60]}:{os.getpid()}:{os.urandom(4).hex()}"
    with transaction.atomic():
        # No lease is granted for longer than SECONDS: if one expires later, the clock was set back.
        free = Lease.objects.filter(Q(expires_at__lte=Now()) | Q(expires_at__gt=_from_now(2 * SECONDS)), name=name)
        if free.update(holder=holder, fence=F("fence") + 1, expires_at=_from_now(SECONDS)) == 1:
            return ActiveLease(name, holder, Lease.objects.values_list("fence", flat=True).get(name=name))
    if Lease.objects.filter(name=name).exists():
        return None
    try:
        with transaction.atomic():
            Lease.objects.create(name=name, holder=holder, fence=1, expires_at=_from_now(SECONDS))
    except IntegrityError:
        return None
    return ActiveLease(name, holder, 1)
