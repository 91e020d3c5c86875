"""What the kernel counts of this launcher's control group: memory's limit, its peak, and processes killed for it.

Version 2 (memory.events, memory.peak) or 1 (memory.oom_control, memory.max_usage_in_bytes). All of it are small reads
from the kernel itself, which wait for nobody.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path("/sys/fs/cgroup")
UNLIMITED_MIB = 1 << 33  # version 1 has a number where there is no limit


@dataclass(frozen=True)
class Memory:
    """Counts since the group was made; None is what this kernel does not tell."""

    version: int
    path: str
    oom_kills: int | None = None
    """Processes of the group that were killed for memory, whoever's limit it was."""
    peak_mib: int | None = None
    limit_mib: int | None = None


def read() -> Memory | None:
    """The group of this process, or None where none is told. Tests have a tree of their own: VIGIL_CGROUPS."""
    root, path, is_second = _place()
    count = "memory.events" if is_second else "memory.oom_control"
    group = next((level for level in _upwards(root, path) if (level / count).exists()), None)
    if group is None:
        return None
    limits = ("memory.max", "memory.peak") if is_second else ("memory.limit_in_bytes", "memory.max_usage_in_bytes")
    limit_mib, peak_mib = _tightest(root, group, *limits)
    return Memory(
        version=2 if is_second else 1,
        path=f"/{group.relative_to(root)}".removesuffix("."),
        oom_kills=_fields(group / count).get("oom_kill"),
        peak_mib=peak_mib,
        limit_mib=limit_mib,
    )


def has_others() -> bool:
    """Whether this process shares its group with others than its own descendants and what it was started by: then what
    is counted may be theirs."""
    root, path, _ = _place()
    group = next((level for level in _upwards(root, path) if (level / "cgroup.procs").exists()), None)
    if group is None:
        return False
    me = psutil.Process()
    ours = {me.pid}
    with suppress(psutil.Error):
        ours |= {one.pid for one in (*me.parents(), *me.children(recursive=True))}
    with suppress(OSError):
        return any(int(pid) not in ours for pid in (group / "cgroup.procs").read_text().split() if pid.isdecimal())
    return False


def _place() -> tuple[Path, str, bool]:
    """The tree that counts memory, this process's path in it, and whether it is version 2's."""
    root = Path(os.environ.get("VIGIL_CGROUPS") or ROOT)
    if (root / "cgroup.controllers").exists():
        return root, _path(""), True
    return root / "memory", _path("memory"), False


def _path(controller: str) -> str:
    """Where this process is in the tree of one controller; "" names version 2's only one."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                return path
    return "/"


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """The group and those that it is in, as far as they are mounted here: in a container up to its own."""
    level = root / path.strip("/")
    while True:
        yield level
        if level == root or root not in level.parents:
            return
        level = level.parent


def _tightest(root: Path, group: Path, limit: str, peak: str) -> tuple[int | None, int | None]:
    """The lowest limit of the group and those above, and the peak where that is set; else the group's own peak."""
    found: tuple[int | None, int | None] = (None, _mib(group / peak))
    for level in _upwards(root, str(group.relative_to(root))):
        there = _mib(level / limit)
        if there is not None and there < UNLIMITED_MIB and (found[0] is None or there < found[0]):
            found = (there, _mib(level / peak))
    return found


def _mib(path: Path) -> int | None:
    with suppress(OSError, ValueError):  # "max"
        return int(path.read_text()) >> 20
    return None


def _fields(path: Path) -> dict[str, int]:
    found = {}
    with suppress(OSError):
        for line in path.read_text().splitlines():
            name, _, value = line.partition(" ")
            if value.isdecimal():
                found[name] = int(value)
    return found
