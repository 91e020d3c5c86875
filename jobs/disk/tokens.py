"""Manage the token with which an attempt's shipper reports: left in the run directory, stored as a digest.

It is revoked when the attempt closes. The file is addressed to exactly one submission, and shippers read it again when
it changes. So it also states how reports travel: "post" to the address, or "tail", where nodes cannot reach the portal
and the worker reads spools.
"""

from __future__ import annotations

import json
import secrets

from django.conf import settings
from django.utils.crypto import salted_hmac

from jobs.disk import rundir
from jobs.models import Attempt
from portal.models import digest


def is_tailed() -> bool:
    """Return whether the worker reads this site's spools."""
    return bool(settings.VIGIL_REPORTS == "tail")


def token_of_attached(attempt: Attempt) -> str:
    """Return the token of an attached attempt, whose folder the portal cannot write: its owner fetches it.

    It is derived, so that every call returns the same one while only a digest is stored. It is revoked like any other.
    """
    mac = salted_hmac("jobs.disk.tokens.attached", f"{attempt.pk}.{attempt.key}", algorithm="sha256").hexdigest()
    secret = f"vga_{mac}"
    if attempt.token_digest != digest(secret):
        attempt.token_digest = digest(secret)
        Attempt.objects.filter(pk=attempt.pk, closed_at=None).update(token_digest=attempt.token_digest)
    return secret


def leave(attempt: Attempt) -> None:
    """Write portal/token for this (scheduler id, restart count), then its digest: a tick finds a row without one."""
    secret = f"vga_{secrets.token_urlsafe(32)}"
    payload = {
        "attempt": attempt.pk,
        "number": attempt.number,
        "scheduler_id": attempt.scheduler_id,
        "restart_count": attempt.scheduler_restart_count,
        "url": settings.VIGIL_REPORT_URL,
        "token": secret,
        "reports": settings.VIGIL_REPORTS,
    }
    rundir.write(rundir.path_of(attempt.job.directory) / "portal" / "token", json.dumps(payload), mode=0o600)
    attempt.token_digest, attempt.tailed = digest(secret), is_tailed()
    Attempt.objects.filter(pk=attempt.pk).update(token_digest=attempt.token_digest, tailed=attempt.tailed)
