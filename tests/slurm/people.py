"""Three unprivileged Unix users for tests: the portal's and two people of the lab, all in one group.

Created as root if they are missing, and never removed: concurrent test runs share them.
"""

from __future__ import annotations

import fcntl
import grp
import os
import pwd
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.slurm import room

PORTAL, ALICE, BOB = "vigil-portal", "vigil-alice", "vigil-bob"
GROUP = "vigil-runs"
FIRST_ID = 2000


@dataclass(frozen=True)
class Person:
    name: str
    uid: int
    gid: int


class People:
    """The portal's user and two people, whom `Person` describes; `group` is the id of their common group."""

    def __init__(self) -> None:
        with (Path(tempfile.gettempdir()) / "vigil-people.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            _make()
        self.portal, self.alice, self.bob = (_find(name) for name in (PORTAL, ALICE, BOB))
        self.group = grp.getgrnam(GROUP).gr_gid

    def as_user(self, name: str, *command: str | Path) -> list[str]:
        """Return the command line that runs a command as one of them, with access to the checkout and its Python."""
        return [sys.executable, "-I", room.__file__, "as", name, *map(str, command)]


def _make() -> None:
    if GROUP not in {entry.gr_name for entry in grp.getgrall()}:
        _run("groupadd", "--key", f"GID_MIN={FIRST_ID}", GROUP)
    names = {entry.pw_name for entry in pwd.getpwall()}
    numbers = ("--key", f"UID_MIN={FIRST_ID}", "--key", f"GID_MIN={FIRST_ID}")
    for name in (PORTAL, ALICE, BOB):
        if name not in names:
            home = ("--no-create-home", "--home-dir=/nonexistent", "--shell=/bin/bash")
            _run("useradd", *numbers, "--user-group", *home, name)
        if name not in grp.getgrnam(GROUP).gr_mem:
            _run("usermod", "--append", "--groups", GROUP, name)


def _find(name: str) -> Person:
    entry = pwd.getpwnam(name)
    return Person(name, entry.pw_uid, entry.pw_gid)


def _run(*command: str) -> None:
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(command)}: {done.stderr.strip()}")
