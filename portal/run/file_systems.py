"""Detect the kind of file system that holds a path, from the kernel's list of mounts."""

from __future__ import annotations

from pathlib import Path

NETWORK_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "fuse.sshfs", "lustre", "gpfs", "beegfs", "ceph", "afs", "glusterfs"}
)


def file_system(path: Path) -> str:
    """Return the kernel's name for the type of the file system that holds this path; "" if unknown."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    kind, longest = "", -1
    for line in lines:
        before, _, after = line.partition(" - ")
        mount = before.split()[4].replace("\\040", " ")
        # Later mounts cover earlier ones at the same path.
        if len(mount) >= longest and path.resolve().is_relative_to(mount):
            kind, longest = after.split()[0], len(mount)
    return kind
