"""Read which versions of software and firmware the node has, as far as that costs next to nothing.

Files that name their version are read, and programs that print it run, once an hour; they are never waited for. What
jobs bring along, such as the NCCL inside torch, is not looked at.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from nodes.agent import proc
from nodes.agent.cleaning import clean
from nodes.agent.polled_command import PolledCommand

EVERY_S, TIMEOUT_S = 3600.0, 10.0
MAX_ADAPTERS = 32
# Local folders only: a network file system that hangs would stop the agent.
LIBRARY_FOLDERS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64")
FURTHER_PATH = "/usr/sbin:/sbin:/usr/local/sbin"
_FROM_PATH = ("/bin/sh", "-c", 'exec "$0" "$@"')
"""The shell looks the program up each time: an upgrade may have moved it, and folders of PATH may hang."""
_NCCL = re.compile(r"libnccl\.so\.([0-9]+(?:\.[0-9]+){1,3})")


class VersionCommand(NamedTuple):
    """A program that prints its version. `pattern`: its first group is the version."""

    software: str
    command: tuple[str, ...]
    pattern: str


COMMANDS = (
    VersionCommand("slurm", ("slurmd", "-V"), r"slurm(?:-wlm)? ([0-9][0-9A-Za-z.\-]*)"),
    VersionCommand("fabric_manager", ("nv-fabricmanager", "--version"), r"version is *: *([0-9][0-9.]*)"),
    VersionCommand("container_toolkit", ("nvidia-ctk", "--version"), r"version ([0-9][0-9A-Za-z.\-]*)"),
)


class SoftwareProbe:
    """Reads the versions on this node. `poll` never waits."""

    def __init__(
        self,
        *,
        every: float = EVERY_S,
        commands: Sequence[VersionCommand] = COMMANDS,
        libraries: Sequence[str] = LIBRARY_FOLDERS,
        sys: Path = Path("/sys"),
    ) -> None:
        self._sys, self._libraries, self._every = sys, libraries, every
        path = {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{FURTHER_PATH}"}
        self._commands = [
            (item, PolledCommand((*_FROM_PATH, *item.command), every=every, timeout=TIMEOUT_S, environment=path))
            for item in commands
        ]
        self._versions: dict[str, str] = {}
        self._unread = {item.software for item, _ in self._commands}
        self._nccl_read_at = -every

    def poll(self) -> None:
        """Read what is due, start the programs that are, and read the output of those that have ended."""
        if time.monotonic() - self._nccl_read_at >= self._every:
            self._nccl_read_at = time.monotonic()
            self._note("nccl", nccl_version(self._libraries))
        for item, command in self._commands:
            output = command.poll()
            if output is None:
                continue
            self._unread.discard(item.software)
            found = re.search(item.pattern, output, re.IGNORECASE)
            self._note(item.software, clean(found[1], 64) if found else "")

    def _note(self, software: str, version: str) -> None:
        """Remember the version; nothing is known of software that names none any more."""
        self._versions[software] = version
        if not version:
            del self._versions[software]

    def wait(self, seconds: float) -> None:
        """Poll until every program has answered once, at most this long; for a command that prints once."""
        until = time.monotonic() + seconds
        self.poll()
        while self._unread and time.monotonic() < until:
            time.sleep(0.05)
            self.poll()

    def facts(self) -> Mapping[str, Any]:
        """Return the versions that are known, and the InfiniBand adapters with their firmware."""
        return {**self._versions, "adapters": adapters(self._sys)}

    def close(self) -> None:
        for _, command in self._commands:
            command.close()


def nccl_version(libraries: Sequence[str]) -> str:
    """Return the version in the name of the file that libnccl.so.2 points to; "" without one."""
    for folder in libraries:
        if found := _NCCL.fullmatch(os.path.basename(os.path.realpath(os.path.join(folder, "libnccl.so.2")))):
            return found[1] if "." in found[1] else ""
    return ""


def adapters(sys: Path) -> list[dict[str, str]]:
    """Return the InfiniBand and RoCE adapters: name, board and firmware version."""
    folder = sys / "class/infiniband"
    found = []
    for name in proc.names(folder)[:MAX_ADAPTERS]:
        firmware = clean(proc.read(folder / name / "fw_ver", 64).strip(), 64)
        board = clean(proc.read(folder / name / "board_id", 64).strip(), 64)
        if firmware:
            found.append({"name": clean(name, 64), "board": board, "firmware": firmware})
    return found
