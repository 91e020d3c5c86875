"""Decide whose jobs may bring code, and which files the jobs of others may read (docs/explanations/security.md).

Under Slurm a job runs as its owner's own Unix user, with VIGIL_LOCAL_USER as one that can do no harm: its permissions
are the system's business. Otherwise it runs as the portal's user, which can read every secret: that is for sysadmins,
unless VIGIL_LOCAL_TRUST=everyone declares that everybody here is trusted.
"""

from __future__ import annotations

import os
import pwd

from django.conf import settings

from jobs.errors import Problem, Refused, SpecError
from jobs.spec import JobSpec
from jobs.spec.trust import misuses
from nodes.schedulers import choose
from portal.models import User


def roots_of(user: User) -> tuple[str, ...] | None:
    """Return the folders that this person's jobs may read, or None for whatever their Unix user may."""
    return None if _is_trusted(user) else tuple(map(str, settings.VIGIL_DATA_ROOTS))


def check(user: User, spec: JobSpec) -> None:
    """Raise Refused or SpecError if this person's job may not do what the specification requests."""
    check_program(user, spec)
    if found := problems(user, spec):
        raise SpecError(found)


def check_program(user: User, spec: JobSpec) -> None:
    """Raise Refused if the job brings a program or clients of its own, and its owner is not trusted."""
    if spec.code is not None and not _is_trusted(user):
        raise Refused(
            "Not submitted: jobs run as the portal's own Unix user here, so only sysadmins may bring code.",
            "A sysadmin can set VIGIL_LOCAL_USER to another Unix user for jobs, or VIGIL_LOCAL_TRUST=everyone.",
        )


def problems(user: User, spec: JobSpec) -> list[Problem]:
    """Return, by field, what this person's job without code requests and may not do."""
    roots = roots_of(user)
    return [] if roots is None or spec.code is not None else list(misuses(spec, roots))


def _is_trusted(user: User) -> bool:
    if (
        choose.capabilities_of(settings.VIGIL_SCHEDULER).runs_as_owner
        or settings.VIGIL_LOCAL_TRUST == "everyone"
        or user.is_sysadmin
    ):
        return True
    return _runs_as_another(settings.VIGIL_LOCAL_USER)


def _runs_as_another(name: str) -> bool:
    """Return whether jobs run as a Unix user other than the portal's, whatever it is called, and other than root."""
    try:
        return bool(name) and pwd.getpwnam(name).pw_uid not in {0, os.geteuid()}
    except KeyError:  # there is no such user, so no job starts
        return True
