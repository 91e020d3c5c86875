"""Locate an attempt's files in its job's run directory, and read the results that it left there."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jobs.disk import rundir
from jobs.models import Attempt

MAX_FOLDERS = 1_000  # attempt folders that are read: a job may have made any number
_FOLDER = re.compile(r"attempt-\d{1,9}\Z")


def root_of(attempt: Attempt) -> Path | None:
    """Return the run directory, or None before it is made."""
    return rundir.path_of(attempt.job.directory) if attempt.job.directory else None


def find_folder(attempt: Attempt) -> str:
    """Return the name of the folder that the launcher made for this (scheduler id, restart count); "" before that."""
    root = root_of(attempt)
    if attempt.directory or root is None or not attempt.scheduler_id:
        return attempt.directory
    wanted = {"scheduler_id": attempt.scheduler_id, "restart_count": attempt.scheduler_restart_count}
    for name in _folders(root, attempt.number):
        if rundir.read_json_under(root, f"job/{name}/owner.json", limit=4096) == wanted:
            Attempt.objects.filter(pk=attempt.pk).update(directory=name)
            attempt.directory = name
            break
    return attempt.directory


def _folders(root: Path, number: int) -> Iterator[str]:
    """Yield the folders that a launcher may have made: its attempt number's first, then the newest others."""
    expected = f"attempt-{number}"
    yield expected
    names = (name for name in rundir.names_under(root, "job") if _FOLDER.match(name) and name != expected)
    yield from sorted(names, key=lambda name: -int(name.removeprefix("attempt-")))[:MAX_FOLDERS]


def result_of(attempt: Attempt) -> dict[str, Any] | None:
    """Return the launcher's result.json, or None if it wrote none."""
    root, folder = root_of(attempt), find_folder(attempt)
    if root is None or not folder:
        return None
    return rundir.read_json_under(root, f"job/{folder}/result.json", limit=65_536)


def has_begun(attempt: Attempt) -> bool:
    """Return whether its batch script has run, or its command has reported: each first leaves a file or a report."""
    if attempt.last_report_at is not None or find_folder(attempt):
        return True
    if (root := root_of(attempt)) is None:
        return False
    try:
        with rundir.folder_under(root, f"job/told/{attempt.scheduler_id}.{attempt.scheduler_restart_count}"):
            return True
    except OSError:
        return False


def age_of_result(attempt: Attempt) -> float | None:
    """Return the seconds since the launcher wrote its result, or None if it wrote none."""
    root, folder = root_of(attempt), find_folder(attempt)
    if root is None or not folder:
        return None
    try:
        descriptor = rundir.open_under(root, f"job/{folder}/result.json")
    except (OSError, rundir.UnsafePath):
        return None
    try:
        return time.time() - os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


def launch_error(attempt: Attempt) -> str:
    """Return why batch.sh could not start a launcher, such as a missing module, environment or package."""
    root = root_of(attempt)
    if root is None or not attempt.scheduler_id.replace("_", "", 1).isdecimal():
        return ""
    path = f"job/told/{attempt.scheduler_id}.{attempt.scheduler_restart_count}/failed"
    try:
        text = rundir.read_under(root, path, limit=4096).decode(errors="replace")
    except OSError:
        return ""
    return "".join(c for c in text.strip()[:500] if c.isprintable())


def is_unreachable(attempt: Attempt) -> bool:
    """Return whether its run directory was made but cannot be reached, as while its file system is not mounted."""
    root = root_of(attempt)
    if root is None:
        return False
    try:
        with rundir.folder_under(root, "portal"):
            return False
    except OSError:
        return True
