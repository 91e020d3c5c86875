"""The token with which an attempt's shipper reports: left in the run directory, kept as a digest, dead at close."""

from __future__ import annotations

import json
import secrets

from django.conf import settings

from jobs import rundir
from jobs.models import Attempt
from portal.models import digest


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
    }
    rundir.write(rundir.path_of(attempt.job.directory) / "portal" / "token", json.dumps(told), mode=0o600)
    Attempt.objects.filter(pk=attempt.pk).update(token_digest=digest(secret))
    attempt.token_digest = digest(secret)
