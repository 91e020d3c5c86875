"""Find disks and mounted file systems, and tell local from network file systems."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nodes.agent import proc
from nodes.agent.cleaning import clean
from nodes.agent.settings import MAX_MOUNTS

MIB = 2**20
SECTOR_BYTES = 512
MAX_DISKS = 24
MAX_LABEL = 72
SHARED = frozenset(
    [
        *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "smbfs", "wekafs", "pvfs2", "orangefs"),
        *("afs", "panfs", "9p", "virtiofs", "ocfs2", "gfs2", "fuse.ceph", "fuse.glusterfs", "fuse.juicefs"),
        *("fuse.sshfs", "fuse.s3fs", "fuse.gcsfuse", "fuse.mfs", "fuse.lizardfs", "fuse.daos"),
    ]
)
ON_DISKS = frozenset(["ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "reiserfs", "bcachefs", "overlay"])
NO_DISKS = re.compile(r"(loop|ram|zram|sr|fd|dm-|md|nbd|drbd)\d")
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class MountedFileSystem:
    path: str
    kind: str
    source: str

    def as_payload(self) -> dict[str, str]:
        return {"mount": label(self.path), "type": clean(self.kind, 32), "source": clean(self.source, 128)}


def label(path: str) -> str:
    """Return a mount's name as the portal gets it."""
    return clean(path, MAX_LABEL)


def mounts(proc_root: Path) -> list[MountedFileSystem]:
    """Return all mounts; where several share a path, the last one, which is the visible one."""
    found: dict[str, MountedFileSystem] = {}
    for line in proc.read(proc_root / "self/mounts").splitlines():
        parts = line.split(" ")
        if len(parts) >= 3:
            source, path, kind = (_ESCAPE.sub(lambda match: chr(int(match[1], 8)), part) for part in parts[:3])
            found[path] = MountedFileSystem(path, kind, source)
    return list(found.values())


def shared(mounted: list[MountedFileSystem]) -> tuple[str, ...]:
    """Return the paths of network file systems; if there are many (homes mounted one by one), the shortest paths."""
    paths = {mount.path for mount in mounted if mount.kind in SHARED}
    return tuple(sorted(sorted(paths, key=lambda path: (len(path), path))[:MAX_MOUNTS]))


def probed(named: tuple[str, ...] | None, proc_root: Path) -> tuple[str, ...]:
    """Return the mounts to time: those in VIGIL_AGENT_MOUNTS; None: every network file system."""
    return shared(mounts(proc_root)) if named is None else named


def room(proc_root: Path) -> dict[str, float | None]:
    """Return used and total space of file systems on local disks, and of shared memory."""
    found: dict[str, float | None] = {}
    for path in _on_disks(mounts(proc_root)):
        found |= _room(path, f"disk_used_mib:{label(path)}", f"disk_total_mib:{label(path)}")
    return found | _room("/dev/shm", "shm_used_mib", "shm_total_mib")


def _room(path: str, used: str, total: str) -> dict[str, float | None]:
    try:
        stats = os.statvfs(path)
    except OSError:
        return {}
    size = stats.f_blocks * stats.f_frsize
    return {used: round((size - stats.f_bfree * stats.f_frsize) / MIB, 1), total: round(size / MIB, 1)} if size else {}


def _on_disks(mounted: list[MountedFileSystem]) -> list[str]:
    """Return one path per file system on a local disk; several mounts of it count once."""
    found: dict[str, str] = {}
    for mount in sorted(mounted, key=lambda mount: (len(mount.path), mount.path)):
        is_disk = mount.source.startswith("/dev/") or mount.kind == "zfs" or mount.path == "/"
        if mount.kind in ON_DISKS and is_disk:
            found.setdefault(mount.source, mount.path)
    return list(found.values())[:MAX_DISKS]


def traffic(proc_root: Path) -> dict[str, float]:
    """Return MiB so far per whole disk: partitions and device-mapper volumes would count the same data twice."""
    found: dict[str, float] = {}
    whole: list[str] = []
    for name, sectors_read, sectors_written in sorted(_disk_counters(proc_root)):
        if len(whole) < MAX_DISKS and not NO_DISKS.match(name) and not any(_is_part(name, disk) for disk in whole):
            whole.append(name)
            found[f"disk_read_mib:{name}"] = sectors_read * SECTOR_BYTES / MIB
            found[f"disk_write_mib:{name}"] = sectors_written * SECTOR_BYTES / MIB
    return found


def _disk_counters(proc_root: Path) -> Iterator[tuple[str, int, int]]:
    for line in proc.read(proc_root / "diskstats").splitlines():
        parts = line.split()
        if len(parts) >= 10 and parts[5].isdigit() and parts[9].isdigit():
            yield clean(parts[2], 48), int(parts[5]), int(parts[9])


def _is_part(name: str, disk: str) -> bool:
    """Return whether `name` is a partition of `disk`: sda1 of sda, nvme0n1p2 of nvme0n1."""
    rest = name.removeprefix(disk)
    return name.startswith(disk) and (rest.isdigit() or (disk[-1].isdigit() and rest[:1] == "p" and rest[1:].isdigit()))
