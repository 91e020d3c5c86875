"""The right to follow: a lease in the database, on the database's clock, with a fence that every write checks.

A holder that was stopped (SIGSTOP, a long pause) past its lease finds on its next write that somebody else has
taken over: the fence in the row is no longer its own, its transaction is rolled back, nothing of it lands.
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
    """Somebody else holds the lease now. What was about to be written was not."""


def _from_now(seconds: float) -> Combinable:
    return ExpressionWrapper(Now() + timedelta(seconds=seconds), output_field=DateTimeField())


@dataclass(frozen=True)
class Held:
    """A lease in our hands, as long as the fence in the row is ours."""

    name: str
    holder: str
    fence: int

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A transaction that only commits if the lease is still ours; it renews it on the way."""
        with transaction.atomic():
            row = Lease.objects.filter(name=self.name, holder=self.holder, fence=self.fence)
            if row.update(expires_at=_from_now(SECONDS)) != 1:
                raise LeaseLost(self.name)
            yield

    def check(self) -> None:
        """LeaseLost unless it is still ours; renewed where it is. Before something is asked of others."""
        with self.writing():
            pass

    def release(self) -> None:
        """Give it back; the fence stays, so that a late write of ours still fails once another has taken it."""
        Lease.objects.filter(name=self.name, holder=self.holder, fence=self.fence).update(expires_at=Now())


def take(name: str, *, holder: str | None = None) -> Held | None:
    """The lease, if nobody holds it; never waits."""
    holder = holder or f"{socket.gethostname()[:60]}:{os.getpid()}:{os.urandom(4).hex()}"
    with transaction.atomic():
        # Nobody is given one for longer than SECONDS: then the clock was set back, perhaps while nobody had it.
        free = Lease.objects.filter(Q(expires_at__lte=Now()) | Q(expires_at__gt=_from_now(2 * SECONDS)), name=name)
        if free.update(holder=holder, fence=F("fence") + 1, expires_at=_from_now(SECONDS)) == 1:
            return Held(name, holder, Lease.objects.values_list("fence", flat=True).get(name=name))
    if Lease.objects.filter(name=name).exists():
        return None
    try:
        with transaction.atomic():
            Lease.objects.create(name=name, holder=holder, fence=1, expires_at=_from_now(SECONDS))
    except IntegrityError:
        return None
    return Held(name, holder, 1)
