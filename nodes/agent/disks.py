"""Disks and what is mounted: which file systems lie on disks of this machine, and which beyond the network."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nodes.agent import proc
from nodes.agent.cleaning import clean
from nodes.agent.settings import MOST_MOUNTS

MIB = 2**20
SECTOR_BYTES = 512
MOST_DISKS = 24
MOST_LABEL = 72
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
class Mount:
    path: str
    kind: str
    source: str

    def as_told(self) -> dict[str, str]:
        return {"mount": label(self.path), "type": clean(self.kind, 32), "source": clean(self.source, 128)}


def label(path: str) -> str:
    """How a mount is named to the portal."""
    return clean(path, MOST_LABEL)


def mounts(proc_root: Path) -> list[Mount]:
    """All that is mounted; what was mounted last over a place is what one finds there."""
    found: dict[str, Mount] = {}
    for line in proc.read(proc_root / "self/mounts").splitlines():
        parts = line.split(" ")
        if len(parts) >= 3:
            source, path, kind = (_ESCAPE.sub(lambda match: chr(int(match[1], 8)), part) for part in parts[:3])
            found[path] = Mount(path, kind, source)
    return list(found.values())


def shared(mounted: list[Mount]) -> tuple[str, ...]:
    """Network file systems: the shortest paths, where there are many, as homes are mounted one by one."""
    paths = {mount.path for mount in mounted if mount.kind in SHARED}
    return tuple(sorted(sorted(paths, key=lambda path: (len(path), path))[:MOST_MOUNTS]))


def probed(named: tuple[str, ...] | None, proc_root: Path) -> tuple[str, ...]:
    """Mounts whose answers are timed: those that VIGIL_AGENT_MOUNTS names; None: every network file system."""
    return shared(mounts(proc_root)) if named is None else named


def room(proc_root: Path) -> dict[str, float | None]:
    """What is used of the file systems on this machine's disks, and of its shared memory."""
    found: dict[str, float | None] = {}
    for path in _on_disks(mounts(proc_root)):
        found |= _room(path, f"disk_used_mib:{label(path)}", f"disk_total_mib:{label(path)}")
    return found | _room("/dev/shm", "shm_used_mib", "shm_total_mib")


def _room(path: str, used: str, total: str) -> dict[str, float | None]:
    try:
        there = os.statvfs(path)
    except OSError:
        return {}
    size = there.f_blocks * there.f_frsize
    return {used: round((size - there.f_bfree * there.f_frsize) / MIB, 1), total: round(size / MIB, 1)} if size else {}


def _on_disks(mounted: list[Mount]) -> list[str]:
    """A path for each file system: what is mounted in several places counts once."""
    found: dict[str, str] = {}
    for mount in sorted(mounted, key=lambda mount: (len(mount.path), mount.path)):
        is_disk = mount.source.startswith("/dev/") or mount.kind == "zfs" or mount.path == "/"
        if mount.kind in ON_DISKS and is_disk:
            found.setdefault(mount.source, mount.path)
    return list(found.values())[:MOST_DISKS]


def traffic(proc_root: Path) -> dict[str, float]:
    """MiB so far of each whole disk: partitions and what is made of several would count them twice."""
    found: dict[str, float] = {}
    whole: list[str] = []
    for name, sectors_read, sectors_written in sorted(_counted(proc_root)):
        if len(whole) < MOST_DISKS and not NO_DISKS.match(name) and not any(_is_part(name, disk) for disk in whole):
            whole.append(name)
            found[f"disk_read_mib:{name}"] = sectors_read * SECTOR_BYTES / MIB
            found[f"disk_write_mib:{name}"] = sectors_written * SECTOR_BYTES / MIB
    return found


def _counted(proc_root: Path) -> Iterator[tuple[str, int, int]]:
    for line in proc.read(proc_root / "diskstats").splitlines():
        parts = line.split()
        if len(parts) >= 10 and parts[5].isdigit() and parts[9].isdigit():
            yield clean(parts[2], 48), int(parts[5]), int(parts[9])


def _is_part(name: str, disk: str) -> bool:
    """sda1 is a part of sda, nvme0n1p2 one of nvme0n1."""
    rest = name.removeprefix(disk)
    return name.startswith(disk) and (rest.isdigit() or (disk[-1].isdigit() and rest[:1] == "p" and rest[1:].isdigit()))
