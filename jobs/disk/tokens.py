"""The token with which an attempt's shipper reports: left in the run directory, kept as a digest, dead at close.

The file is the portal's word to exactly one submission, and shippers read it again when it changes. So it also says
how reports travel: "post" to the address, or "tail", where nodes cannot reach the portal and the worker reads spools.
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
    """Whether the site has its spools read by the worker."""
    return bool(settings.VIGIL_REPORTS == "tail")


def of_attached(attempt: Attempt) -> str:
    """The token of an attempt whose folder is not ours to write into: its owner asks for it, and gets the same again.

    So it is derived, as nothing but digests is kept. It dies as every other does.
    """
    word = salted_hmac("jobs.disk.tokens.attached", f"{attempt.pk}.{attempt.key}", algorithm="sha256").hexdigest()
    secret = f"vga_{word}"
    if attempt.token_digest != digest(secret):
        attempt.token_digest = digest(secret)
        Attempt.objects.filter(pk=attempt.pk, closed_at=None).update(token_digest=attempt.token_digest)
    return secret


def leave(attempt: Attempt) -> None:
    """Write portal/token for this (scheduler id, restart count). The file first: a tick finds a row without one."""
    secret = f"vga_{secrets.token_urlsafe(32)}"
    told = {
        "attempt": attempt.pk,
        "number": attempt.number,
        "scheduler_id": attempt.scheduler_id,
        "restart_count": attempt.scheduler_restart_count,
        "url": settings.VIGIL_REPORT_URL,
        "token": secret,
        "reports": settings.VIGIL_REPORTS,
    }
    rundir.write(rundir.path_of(attempt.job.directory) / "portal" / "token", json.dumps(told), mode=0o600)
    attempt.token_digest, attempt.tailed = digest(secret), is_tailed()
    Attempt.objects.filter(pk=attempt.pk).update(token_digest=attempt.token_digest, tailed=attempt.tailed)
