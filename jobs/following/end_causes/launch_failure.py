"""Explain why a node never started an attempt's batch script, as far as that can be known.

Slurm (22.05 to 26.05) reports 0:53 for everything that slurmd could not do before the script's first line: open its
output, find its user. A missing working folder is not one: the script then starts in /tmp.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jobs.disk import folders, logs
from jobs.disk.access import Barrier, barrier
from jobs.models import Attempt
from nodes.cluster import sync
from nodes.schedulers.base import JobStatus

NOT_STARTED = 53  # slurmd's signal number for a script that it could not start


@dataclass(frozen=True)
class LaunchFailure:
    """Why a batch script was never started.

    `cause`: permission, if the folder that is closed is known; else launch.
    """

    cause: str
    reason: str


def launch_failure_of(attempt: Attempt, status: JobStatus) -> LaunchFailure | None:
    """Return what kept it from starting; None if its script did start, or that is unknown."""
    if status.state != "failed" or folders.is_unreachable(attempt) or folders.has_begun(attempt):
        return None
    if (found := _closed_folder(attempt)) is not None:
        return LaunchFailure("permission", _permission_text(attempt, found))
    if status.signal != NOT_STARTED:
        return None
    where = f" on {status.nodes[0]}" if status.nodes else ""
    return LaunchFailure("launch", f"Slurm could not start it{where} (0:53): {_possible_causes(attempt)}")


def _closed_folder(attempt: Attempt) -> Barrier | None:
    """Return the first folder that its user may not enter, or not write to."""
    root, user = folders.root_of(attempt), sync.unix_user(attempt.scheduler_user)
    if root is None or not user:
        return None
    return barrier(root / "job", user, write=True)


def _permission_text(attempt: Attempt, found: Barrier) -> str:
    root = folders.root_of(attempt)
    if root is not None and found.path.is_relative_to(root):  # Vigil shares it again at every start
        return f"{found} Its access list was changed: resume the job, and Vigil grants {found.user} access again."
    return f"{found} A sysadmin can fix it: {found.remedy}."


def _possible_causes(attempt: Attempt) -> str:
    """Return what may have kept it from starting, and which log explains it."""
    user = attempt.scheduler_user or "its user"
    log_hint = "see slurmd's log on that node."
    root = folders.root_of(attempt)
    if root is None:
        return f"the node could not write its output or does not know {user}; {log_hint}"
    output: Path = root / logs.batch_log(attempt)
    return f"the node could not write {output} (is it mounted there?) or does not know {user}; {log_hint}"
