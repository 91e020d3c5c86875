"""Explain Slurm's refusals to change nodes and reservations: which right its administrator must grant to Vigil's user.

Slurm's own words are "Invalid user id" or "Access/permission denied", from slurmrestd with a number, from scontrol
without one.
"""

from __future__ import annotations

import re

from nodes.schedulers.base import SchedulerError

_NUMBERS = frozenset({2002, 2010})  # ESLURM_ACCESS_DENIED, ESLURM_USER_ID_MISSING
_WORDS = re.compile(r"Invalid user id|permission denied", re.IGNORECASE)


def with_remedy(error: SchedulerError, user: str, refused: str) -> SchedulerError:
    """Return the error that says how to allow it if Slurm refused because of the user's rights; else the same error.

    `refused` says what the user tried, such as "change nodes".
    """
    if not error.permanent or not (error.number in _NUMBERS or _WORDS.search(str(error))):
        return error
    return SchedulerError(
        f"Slurm does not let {user} {refused} ({str(error).rstrip('.')}). Allow it:"
        f" sacctmgr modify user {user} set AdminLevel=Admin. Then order it again.",
        permanent=True,
        number=error.number,
    )
