"""The places of an attempt's files in its job's run directory, and the last words that it left there."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jobs.disk import rundir
from jobs.models import Attempt

MOST_FOLDERS = 1_000  # of attempts that are looked into: a job may have made any number
_FOLDER = re.compile(r"attempt-\d{1,9}\Z")


def root_of(attempt: Attempt) -> Path | None:
    """The run directory, once there is one."""
    return rundir.path_of(attempt.job.directory) if attempt.job.directory else None


def find_folder(attempt: Attempt) -> str:
    """The name of the folder that the launcher made for this (scheduler id, restart count); "" while there is none."""
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
    """The folders that a launcher may have made: that of the number which it was told, then the newest others."""
    told = f"attempt-{number}"
    yield told
    names = (name for name in rundir.names_under(root, "job") if _FOLDER.match(name) and name != told)
    yield from sorted(names, key=lambda name: -int(name.removeprefix("attempt-")))[:MOST_FOLDERS]


def result_of(attempt: Attempt) -> dict[str, Any] | None:
    """The launcher's last word, if it had one."""
    root, folder = root_of(attempt), find_folder(attempt)
    if root is None or not folder:
        return None
    return rundir.read_json_under(root, f"job/{folder}/result.json", limit=65_536)


def has_begun(attempt: Attempt) -> bool:
    """Whether its batch script has run, or its command reported: each leaves something before it does anything."""
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
    """Seconds since the launcher's last word; None where it has had none."""
    root, folder = root_of(attempt), find_folder(attempt)
    if root is None or not folder:
        return None
    try:
        descriptor = rundir.open_under(root, f"job/{folder}/result.json")
    except (OSError, rundir.Unsafe):
        return None
    try:
        return time.time() - os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)


def said_before_launch(attempt: Attempt) -> str:
    """Why batch.sh could start no launcher: a module, an environment, a package that is not there."""
    root = root_of(attempt)
    if root is None or not attempt.scheduler_id.replace("_", "", 1).isdecimal():
        return ""
    told = f"job/told/{attempt.scheduler_id}.{attempt.scheduler_restart_count}/failed"
    try:
        text = rundir.read_under(root, told, limit=4096).decode(errors="replace")
    except OSError:
        return ""
    return "".join(c for c in text.strip()[:500] if c.isprintable())


def is_away(attempt: Attempt) -> bool:
    """Whether its run directory was made and is not there, as when the file system is away: who knows what it holds."""
    root = root_of(attempt)
    if root is None:
        return False
    try:
        with rundir.folder_under(root, "portal"):
            return False
    except OSError:
        return True
