"""Set up the inside of a container as its first process, then execute the command. Standard library only.

    unshare --mount --pid … python -I enter.py      with the container's description as JSON on standard input

Like an engine, it mounts the image's files as the root, a separate /proc, /dev and /tmp, and volumes and secrets where
the compose file says, and then drops root without a way back.
"""

from __future__ import annotations

import ctypes
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

DEVICES = ("full", "null", "random", "tty", "urandom", "zero")
_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 24, 38


def main() -> None:
    request = json.load(sys.stdin)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    socket.sethostname(request["name"])
    root = Path(request["root"])
    furnish(root, request)
    os.chroot(root)
    os.chdir(request["folder"])
    if request["without_capabilities"]:
        drop_capabilities()
    become(request["user"])
    os.execvpe(request["command"][0], request["command"], request["environment"])


def furnish(root: Path, options: dict[str, Any]) -> None:
    for source, place, read_only in options["mounts"]:
        bind(Path(source), root / place.lstrip("/"), read_only=read_only)
    for place in options["tmpfs"]:
        mount("-t", "tmpfs", "tmpfs", root / place.lstrip("/"))
    mount("-t", "proc", "proc", root / "proc")
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", root / "dev")
    for device in DEVICES:
        bind(Path("/dev", device), root / "dev" / device)
    (root / "dev/shm").mkdir()
    mount("-t", "tmpfs", "-o", f"size={options['shm_size']}", "tmpfs", root / "dev/shm")
    if options["read_only"]:
        # This view of the root alone, and none of what was mounted in it.
        mount("-o", "remount,bind,ro", root)


def bind(source: Path, target: Path, *, read_only: bool = False) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    mount("--bind", source, target)
    if read_only:
        mount("-o", "remount,bind,ro", target)


def mount(*words: str | Path) -> None:
    subprocess.run(["mount", *words], check=True)


def drop_capabilities() -> None:
    library = ctypes.CDLL(None)
    library.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    last = int(Path("/proc/sys/kernel/cap_last_cap").read_text())
    for capability in range(last + 1):
        library.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


def become(user: str) -> None:
    """Switch to the image's user, by its name in the image's /etc/passwd."""
    if not user:
        return
    fields = next(
        line.split(":") for line in Path("/etc/passwd").read_text().splitlines() if line.startswith(f"{user}:")
    )
    os.setgroups([])
    os.setgid(int(fields[3]))
    os.setuid(int(fields[2]))


if __name__ == "__main__":
    main()
