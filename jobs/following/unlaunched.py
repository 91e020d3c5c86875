"""An attempt whose batch script the node never started: because of whose permissions, or at least that it was so.

Slurm (22.05 to 26.05) says 0:53 of all that slurmd could not do before the script's first line: open its output,
find its user. A working folder that is not there is no reason: the script then starts in /tmp.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jobs.disk import folders, logs
from jobs.disk.access import Barrier, barrier
from jobs.models import Attempt
from nodes.cluster import sync
from nodes.schedulers.base import JobStatus

NOT_STARTED = 53  # slurmd's own signal number for it


@dataclass(frozen=True)
class Unlaunched:
    """`cause`: permission, where the folder that is closed is known; else launch."""

    cause: str
    reason: str


def unlaunched_of(attempt: Attempt, status: JobStatus) -> Unlaunched | None:
    """What kept it from starting; None where its script did start, or nobody can tell."""
    if status.state != "failed" or folders.is_away(attempt) or folders.has_begun(attempt):
        return None
    if (found := _closed_to(attempt)) is not None:
        return Unlaunched("permission", _told(attempt, found))
    if status.signal != NOT_STARTED:
        return None
    where = f" on {status.nodes[0]}" if status.nodes else ""
    return Unlaunched("launch", f"Slurm could not start it{where} (0:53): {_possible(attempt)}")


def _closed_to(attempt: Attempt) -> Barrier | None:
    """The first folder that its user may not go through, or not write to."""
    root, user = folders.root_of(attempt), sync.unix_user(attempt.scheduler_user)
    if root is None or not user:
        return None
    return barrier(root / "job", user, write=True)


def _told(attempt: Attempt, found: Barrier) -> str:
    root = folders.root_of(attempt)
    if root is not None and found.path.is_relative_to(root):  # Vigil shares it again at every start
        return f"{found} Its access list was changed: resume it, and Vigil opens it to {found.user} anew."
    return f"{found} A sysadmin sets that right: {found.remedy}."


def _possible(attempt: Attempt) -> str:
    """What it may have been, and where that is written."""
    user = attempt.scheduler_user or "its user"
    said = "slurmd's log there says which."
    root = folders.root_of(attempt)
    if root is None:
        return f"the node could not write its output, or does not know {user}; {said}"
    output: Path = root / logs.batch(attempt)
    return f"the node could not write {output}, as where that is not mounted, or does not know {user}; {said}"
