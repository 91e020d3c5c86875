"""Read this launcher's memory control group: limit, peak, and processes that were killed for lack of memory.

Version 2 (memory.events, memory.peak) or 1 (memory.oom_control, memory.max_usage_in_bytes). These are small reads
from the kernel, which never block.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path("/sys/fs/cgroup")
UNLIMITED_MIB = 1 << 33  # version 1 reports a huge number where there is no limit


@dataclass(frozen=True)
class Memory:
    """Counts since the group was created; None where this kernel does not report the value."""

    version: int
    path: str
    oom_kills: int | None = None
    """Processes of the group that the OOM killer ended, whichever group's limit was reached."""
    peak_mib: int | None = None
    limit_mib: int | None = None


def read() -> Memory | None:
    """Return the memory group of this process, or None where there is none.

    Tests set VIGIL_CGROUPS to a tree of their own.
    """
    root, path, is_v2 = _hierarchy()
    count = "memory.events" if is_v2 else "memory.oom_control"
    group = next((level for level in _upwards(root, path) if (level / count).exists()), None)
    if group is None:
        return None
    limits = ("memory.max", "memory.peak") if is_v2 else ("memory.limit_in_bytes", "memory.max_usage_in_bytes")
    limit_mib, peak_mib = _tightest(root, group, *limits)
    return Memory(
        version=2 if is_v2 else 1,
        path=f"/{group.relative_to(root)}".removesuffix("."),
        oom_kills=_fields(group / count).get("oom_kill"),
        peak_mib=peak_mib,
        limit_mib=limit_mib,
    )


def has_others() -> bool:
    """Return whether unrelated processes share this process's group, so that its counts may be theirs.

    Unrelated: neither descendants nor ancestors of this process.
    """
    root, path, _ = _hierarchy()
    group = next((level for level in _upwards(root, path) if (level / "cgroup.procs").exists()), None)
    if group is None:
        return False
    me = psutil.Process()
    ours = {me.pid}
    with suppress(psutil.Error):
        ours |= {process.pid for process in (*me.parents(), *me.children(recursive=True))}
    with suppress(OSError):
        return any(int(pid) not in ours for pid in (group / "cgroup.procs").read_text().split() if pid.isdecimal())
    return False


def _hierarchy() -> tuple[Path, str, bool]:
    """Return the hierarchy that counts memory, this process's path in it, and whether it is version 2."""
    root = Path(os.environ.get("VIGIL_CGROUPS") or ROOT)
    if (root / "cgroup.controllers").exists():
        return root, _path(""), True
    return root / "memory", _path("memory"), False


def _path(controller: str) -> str:
    """Return this process's path in the hierarchy of one controller; "" is version 2's single hierarchy."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controller in controllers.split(","):
                return path
    return "/"


def _upwards(root: Path, path: str) -> Iterator[Path]:
    """Yield the group and its ancestors as far as they are mounted here: in a container, up to the container's own."""
    level = root / path.strip("/")
    while True:
        yield level
        if level == root or root not in level.parents:
            return
        level = level.parent


def _tightest(root: Path, group: Path, limit: str, peak: str) -> tuple[int | None, int | None]:
    """Return the lowest limit among the group and its ancestors with the peak at that level.

    Else the group's own peak.
    """
    found: tuple[int | None, int | None] = (None, _mib(group / peak))
    for level in _upwards(root, str(group.relative_to(root))):
        level_limit = _mib(level / limit)
        if level_limit is not None and level_limit < UNLIMITED_MIB and (found[0] is None or level_limit < found[0]):
            found = (level_limit, _mib(level / peak))
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
