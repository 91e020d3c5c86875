"""Detect queued jobs whose run directory is missing, as after a restore of the database without VIGIL_RUNS.

Such a job cannot start, and the scheduler would fail it without giving a reason.
"""

from __future__ import annotations

import errno
from pathlib import Path

from jobs.disk import rundir
from jobs.models import Attempt


class RunDirectoryMissing(OSError):
    """The run directory is missing. It may come back, so jobs that wait for it keep waiting."""

    def __init__(self, directory: str) -> None:
        super().__init__(errno.ENOTCONN, problem_of(directory))

    def __str__(self) -> str:
        return str(self.strerror)


def text_of(error: OSError) -> str:
    """Return why a run directory could not be used."""
    return str(error) if isinstance(error, RunDirectoryMissing) else f"The run directory cannot be written: {error}"


def problem(attempt: Attempt) -> str:
    """Return that a queued attempt cannot start without its run directory, and what to do; "" if it can."""
    directory = attempt.job.directory
    if attempt.state != Attempt.State.PENDING or not directory or attempt.cancel_asked_at is not None:
        return ""
    return "" if is_there(rundir.path_of(directory)) else problem_of(directory)


def is_there(root: Path) -> bool:
    """Return whether a run directory exists; one that cannot be read now is not called missing."""
    try:
        return (root / "job").is_dir()
    except OSError:
        return True


def problem_of(directory: str) -> str:
    """Return what is missing: the file system with all run directories, or only this one."""
    root = rundir.path_of(directory)
    if rundir.is_unreachable(directory):
        return (
            f"Its run directory {root} cannot be reached: the folder above it is missing, too."
            " Mount the file system of VIGIL_RUNS; the job then starts by itself."
        )
    return (
        f"Its run directory {root} is missing, as after a restore of the database alone."
        " Put it back from the backup of VIGIL_RUNS, or cancel this job and submit it again."
    )
