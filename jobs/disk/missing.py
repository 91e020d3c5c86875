"""A job that waits and whose run directory is not there, as where a database was restored without VIGIL_RUNS.

It cannot start, and would fail in the scheduler's hands without a word of why.
"""

from __future__ import annotations

import errno
from pathlib import Path

from jobs.disk import rundir
from jobs.models import Attempt


class Missing(OSError):
    """The run directory is not there. It may come back, so what waits for it goes on waiting."""

    def __init__(self, directory: str) -> None:
        super().__init__(errno.ENOTCONN, problem_of(directory))

    def __str__(self) -> str:
        return str(self.strerror)


def problem(attempt: Attempt) -> str:
    """Return why an attempt that waits cannot start for want of its run directory, and what to do; "" if it can."""
    directory = attempt.job.directory
    if attempt.state != Attempt.State.PENDING or not directory or attempt.cancel_asked_at is not None:
        return ""
    return "" if is_there(rundir.path_of(directory)) else problem_of(directory)


def is_there(root: Path) -> bool:
    """Return whether a run directory is there; one that cannot be looked at now is not called missing."""
    try:
        return (root / "job").is_dir()
    except OSError:
        return True


def problem_of(directory: str) -> str:
    """Say what is missing: the file system with all run directories, or this one alone."""
    root = rundir.path_of(directory)
    if rundir.is_away(directory):
        return (
            f"Its run directory {root} cannot be reached: the folder above it is missing, too."
            " Mount the file system of VIGIL_RUNS; the job then starts by itself."
        )
    return (
        f"Its run directory {root} is missing, as after a restore of the database alone."
        " Put it back from the backup of VIGIL_RUNS, or cancel this job and submit it again."
    )
