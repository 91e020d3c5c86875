"""The kernel's files, read for what they say: one that is not there, or says something else, tells nothing."""

from __future__ import annotations

import os
from pathlib import Path

MOST_BYTES = 1 << 20


def read(path: Path | str, most: int = MOST_BYTES) -> str:
    """A file's text, "" where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(most).decode(errors="replace")
    except OSError:
        return ""


def number(path: Path | str) -> int | None:
    """The whole number that a file holds."""
    try:
        return int(read(path, 64))
    except ValueError:
        return None


def names(folder: Path | str) -> list[str]:
    """What a folder holds, in order; nothing where there is none."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def boot_id(proc: Path) -> str:
    return read(proc / "sys/kernel/random/boot_id", 64).strip()


def uptime(proc: Path) -> float:
    """Seconds since boot, those asleep included."""
    try:
        return float(read(proc / "uptime", 64).split()[0])
    except (ValueError, IndexError):
        return 0.0


def blocked(proc: Path) -> list[int]:
    """Processes in state D: they wait for a disk, a file system or a driver, and no signal reaches them."""
    found = []
    for name in names(proc):
        if name.isdigit() and read(proc / name / "stat", 512).rpartition(") ")[2].startswith("D"):
            found.append(int(name))
    return found
