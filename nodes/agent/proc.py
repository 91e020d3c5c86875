"""Read the kernel's files; a missing or malformed one yields an empty value."""

from __future__ import annotations

import os
from pathlib import Path

MAX_BYTES = 1 << 20


def read(path: Path | str, most: int = MAX_BYTES) -> str:
    """Return a file's text; "" if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(most).decode(errors="replace")
    except OSError:
        return ""


def number(path: Path | str) -> int | None:
    """Return the integer in a file; None if there is none."""
    try:
        return int(read(path, 64))
    except ValueError:
        return None


def names(folder: Path | str) -> list[str]:
    """Return a folder's entries in order; empty if it does not exist."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def boot_id(proc: Path) -> str:
    return read(proc / "sys/kernel/random/boot_id", 64).strip()


def uptime(proc: Path) -> float:
    """Return the seconds since boot, including time asleep."""
    try:
        return float(read(proc / "uptime", 64).split()[0])
    except (ValueError, IndexError):
        return 0.0


def blocked(proc: Path) -> list[int]:
    """Return the pids in state D: they wait for a disk, a file system or a driver, and ignore signals."""
    found = []
    for name in names(proc):
        if name.isdigit() and read(proc / name / "stat", 512).rpartition(") ")[2].startswith("D"):
            found.append(int(name))
    return found
