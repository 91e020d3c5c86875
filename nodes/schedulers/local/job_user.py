"""The Unix user that jobs run as, where it is not the portal's own, and whether it can reach what a job needs."""

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
    """Return the user in numbers; None where jobs run as ourselves. Raise SchedulerError where that cannot be."""
    if not name or name == pwd.getpwuid(os.geteuid()).pw_name:
        return None
    try:
        user = pwd.getpwnam(name)
    except KeyError:
        raise SchedulerError(f"VIGIL_LOCAL_USER={name}: there is no such Unix user.", permanent=True) from None
    if os.geteuid() != 0:
        message = f"Only root can start jobs as {name}. Start the portal as root, or as {name}."
        raise SchedulerError(message, permanent=True)
    groups = [group.gr_gid for group in grp.getgrall() if name in group.gr_mem]
    known = {"name": name, "uid": user.pw_uid, "gid": user.pw_gid, "home": user.pw_dir, "shell": user.pw_shell}
    return {**known, "groups": [user.pw_gid, *groups]}


def check_reach(user: Mapping[str, Any], submission: Submission) -> None:
    """Refuse if the user cannot get to the run directory or to our programs, before the job fails halfway."""
    for path, remedy in (
        (submission.directory, "Set VIGIL_RUNS to a folder that it may enter, such as /srv/vigil."),
        (os.path.realpath(sys.executable), "Install Vigil on a Python that every user may read."),
        (shim.__file__, "Install Vigil where every user may read it."),
    ):
        if (closed := _closed_to(user, Path(path))) is not None:
            raise SchedulerError(f"{user['name']} may not enter {closed}. {remedy}", permanent=True)


def _closed_to(user: Mapping[str, Any], path: Path) -> Path | None:
    """Return the first folder on the way to a path that the user may not enter."""
    for folder in reversed(path.parents):
        about = folder.stat()
        if about.st_uid == user["uid"]:
            may = about.st_mode & stat.S_IXUSR
        elif about.st_gid in user["groups"]:
            may = about.st_mode & stat.S_IXGRP
        else:
            may = about.st_mode & stat.S_IXOTH
        if not may:
            return folder
    return None
