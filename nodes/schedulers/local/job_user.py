"""Find the Unix user that jobs run as, and check that this user can reach what a job needs."""

from __future__ import annotations

import grp
import os
import pwd
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nodes.schedulers.base import SchedulerError, Submission
from nodes.schedulers.local import shim


def find(name: str) -> dict[str, Any] | None:
    """Return the user as numeric ids; None if jobs run as our own user. Raise SchedulerError if that is impossible."""
    if not name or name == pwd.getpwuid(os.geteuid()).pw_name:
        return None
    try:
        user = pwd.getpwnam(name)
    except KeyError:
        raise SchedulerError(f"VIGIL_LOCAL_USER={name}: no such Unix user exists.", permanent=True) from None
    if os.geteuid() != 0:
        message = f"Only root can start jobs as {name}. Start the portal as root, or as {name}."
        raise SchedulerError(message, permanent=True)
    groups = [group.gr_gid for group in grp.getgrall() if name in group.gr_mem]
    entry = {"name": name, "uid": user.pw_uid, "gid": user.pw_gid, "home": user.pw_dir, "shell": user.pw_shell}
    return {**entry, "groups": [user.pw_gid, *groups]}


def check_reach(user: Mapping[str, Any], submission: Submission) -> None:
    """Raise SchedulerError if the user cannot enter the run directory or read our programs, before the job starts."""
    for path, remedy in (
        (submission.directory, "Set VIGIL_RUNS to a folder that this user may enter, such as /srv/vigil."),
        (os.path.realpath(sys.executable), "Install Vigil on a Python that every user may read."),
        (shim.__file__, "Install Vigil where every user may read it."),
    ):
        if (blocked := _first_blocked_folder(user, Path(path))) is not None:
            raise SchedulerError(f"{user['name']} cannot enter {blocked}. {remedy}", permanent=True)


def _first_blocked_folder(user: Mapping[str, Any], path: Path) -> Path | None:
    """Return the first folder on a path that the user may not enter; None if all are open."""
    for folder in reversed(path.parents):
        info = folder.stat()
        if info.st_uid == user["uid"]:
            may = info.st_mode & stat.S_IXUSR
        elif info.st_gid in user["groups"]:
            may = info.st_mode & stat.S_IXGRP
        else:
            may = info.st_mode & stat.S_IXOTH
        if not may:
            return folder
    return None
