"""Check that the disks of VIGIL_HOME, VIGIL_RUNS and the database answer and have space."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from django.conf import settings
from django.db import connection

from console.health import database_disk
from console.health.finding import Finding
from vigil_core import formatting

# Both must hold, so that neither a large disk with terabytes free nor a small one that is half empty is called full.
NEARLY_FULL_SHARE, NEARLY_FULL_BYTES = 0.05, 20 * 1024**3
FULL_BYTES = 256 * 1024**2  # a write-ahead log and one upload still fit
MIN_FREE_INODE_SHARE = 0.01
PATIENCE_S = 2.0  # for a file system that hangs


@dataclass(frozen=True)
class DiskSpace:
    """Free and total space and inodes of a file system."""

    free: int
    total: int
    free_inodes: int
    total_inodes: int

    @property
    def is_full(self) -> bool:
        return self.free < FULL_BYTES or (self.total_inodes > 0 and self.free_inodes == 0)

    @property
    def is_nearly_full(self) -> bool:
        few = 0 < self.free_inodes < self.total_inodes * MIN_FREE_INODE_SHARE
        return few or (self.free < NEARLY_FULL_BYTES and self.free < self.total * NEARLY_FULL_SHARE)


class _Probe(threading.Thread):
    """Read the free space at a path. On a hanging file system the thread stays blocked, and nobody waits for it."""

    running: dict[Path, _Probe] = {}  # noqa: RUF012

    def __init__(self, path: Path) -> None:
        super().__init__(name="disk", daemon=True)
        self.path = path
        self.found: DiskSpace | OSError | None = None

    def run(self) -> None:
        try:
            stat = os.statvfs(self.path)
            self.found = DiskSpace(
                stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize, stat.f_favail, stat.f_files
            )
        except OSError as error:
            self.found = error


def disk_space(path: Path) -> DiskSpace | OSError | None:
    """Return the free space at a path, or why it cannot be read; None if its file system does not answer in time."""
    probe = _Probe.running.get(path)
    if probe is None:
        probe = _Probe.running[path] = _Probe(path)
        probe.start()
    probe.join(PATIENCE_S)
    if not probe.is_alive():
        _Probe.running.pop(path, None)
    return probe.found


def check() -> Iterator[Finding]:
    for code, name, path in _locations():
        yield from _assess(code, name, path, disk_space(path))
    if connection.vendor == "postgresql":
        yield from _database_server()


def _locations() -> Iterator[tuple[str, str, Path]]:
    yield "disk.home", "VIGIL_HOME", settings.VIGIL_HOME
    yield "disk.runs", "VIGIL_RUNS", settings.VIGIL_RUNS
    if connection.vendor == "sqlite":
        folder = Path(str(settings.DATABASES["default"]["NAME"])).parent
        if folder.is_dir() and folder.resolve() != settings.VIGIL_HOME:
            yield "disk.database", "the database", folder


def _database_server() -> Iterator[Finding]:
    """Check the disk of a database server that runs on this machine; else yield why it is not checked."""
    folder = database_disk.data_directory()
    if folder is None:
        return
    if isinstance(folder, Path):
        room = disk_space(folder)
        if not isinstance(room, OSError):
            yield from _assess("disk.database", "the database", folder, room)
            return
        folder = database_disk.UNSEEN
    title = database_disk.TITLE.format(folder.why)
    yield Finding("disk", "disk.database", "unchecked", title, "", folder.remedy)


def _assess(code: str, name: str, path: Path, found: DiskSpace | OSError | None) -> Iterator[Finding]:
    if found is None or isinstance(found, OSError):
        yield _unreadable(code, name, path, found)
    elif found.is_full:
        yield _full("error", f"The disk of {name} is full.", code, path, found)
    elif found.is_nearly_full:
        yield _full("warning", f"The disk of {name} is nearly full.", code, path, found)


def _unreadable(code: str, name: str, path: Path, error: OSError | None) -> Finding:
    why = "its file system does not answer" if error is None else (error.strerror or str(error))
    return Finding(
        "disk", code, "error", f"{name} cannot be reached.", f"{path}: {why}.", "Mount it, or repair its file server."
    )


def _full(level: str, title: str, code: str, path: Path, room: DiskSpace) -> Finding:
    inodes = f", {room.free_inodes:,} of {room.total_inodes:,} inodes" if room.total_inodes else ""
    return Finding(
        "disk",
        code,
        "error" if level == "error" else "warning",
        title,
        f"{path} has {formatting.disk(room.free)} of {formatting.disk(room.total)} free{inodes}.",
        "Delete jobs and checkpoints that nobody needs (page Disk), or enlarge the disk.",
    )
