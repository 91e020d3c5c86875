"""Whose jobs may bring code, and which files the others' may read (docs/security.md).

Under Slurm a job runs as its owner's own Unix user, with VIGIL_LOCAL_USER as one that can do no harm: what it may do is
the system's to say. Else it runs as the portal's, which can read every secret: that is for sysadmins, unless
VIGIL_LOCAL_TRUST=everyone says that all people here are.
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
    """The folders that this person's jobs may read; None: whatever their Unix user may."""
    return None if _is_trusted(user) else tuple(map(str, settings.VIGIL_DATA_ROOTS))


def check(user: User, spec: JobSpec) -> None:
    """Raises Refused or SpecError where this person's job may not do what the specification asks for."""
    check_program(user, spec)
    if found := problems(user, spec):
        raise SpecError(found)


def check_program(user: User, spec: JobSpec) -> None:
    """A program of one's own, or clients, are code as a whole."""
    if spec.code is not None and not _is_trusted(user):
        raise Refused(
            "Not submitted: jobs run as the portal's own Unix user here, so code is taken from sysadmins only.",
            "A sysadmin can set VIGIL_LOCAL_USER to another Unix user for jobs, or VIGIL_LOCAL_TRUST=everyone.",
        )


def problems(user: User, spec: JobSpec) -> list[Problem]:
    """Tells by field what a job of this person's that brings no code asks for and may not do."""
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
    """Whether jobs run as a Unix user that is not the portal's, whatever it is called, nor root."""
    try:
        return bool(name) and pwd.getpwnam(name).pw_uid not in {0, os.geteuid()}
    except KeyError:  # nobody by that name: no job starts
        return True
