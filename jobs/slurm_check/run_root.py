"""Check the run root: on a disk shared by portal and nodes, closed to everybody whose jobs do not use it."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from jobs.disk import sharing
from jobs.disk.access import group_name, user_name
from jobs.slurm_check.checked_site import CheckedSite
from jobs.slurm_check.finding import CheckFinding, failed, ok, warn
from portal.run.file_systems import NETWORK_FILE_SYSTEMS, file_system

MIN_FREE_BYTES = 50 * 1024**3
GIB = 1024**3
MAKE = "install -d -o {owner} -g GROUP -m 2710 {root}"


def exists(site: CheckedSite) -> Iterator[CheckFinding]:
    title, root = "VIGIL_RUNS", site.runs
    me = pwd.getpwuid(os.geteuid()).pw_name
    if not root.is_dir():
        remedy = f"Mount its file system, or make it: {MAKE.format(owner=me, root=root)}"
        yield failed(title, f"{root} is missing", remedy)
        return
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        yield failed(title, f"{root} cannot be written by {me}", f"chown {me} {root}")
        return
    yield ok(title, str(root))
    kind = file_system(root)
    if kind in NETWORK_FILE_SYSTEMS:
        yield ok("VIGIL_RUNS: file system", f"{kind}: shared")
    else:
        remedy = "Put VIGIL_RUNS where nodes have it at the same path. If this machine exports it to them, ignore this."
        yield warn("VIGIL_RUNS: file system", f"{kind or 'unknown'}: a local disk", remedy)


def mode(site: CheckedSite) -> Iterator[CheckFinding]:
    title, root = "VIGIL_RUNS: mode", site.runs
    status = root.stat()
    bits, group = stat.S_IMODE(status.st_mode), group_name(status.st_gid)
    mode_text = f"{bits:04o}, of {user_name(status.st_uid)} and group {group}"
    if bits & stat.S_IRWXO:
        yield failed(title, f"{mode_text}: everybody may read it", f"chmod 2710 {root}")
    elif not bits & stat.S_IXGRP:
        yield failed(title, f"{mode_text}: no job can enter it", f"chmod 2710 {root}")
    elif status.st_uid != os.geteuid():
        yield warn(
            title,
            f"{mode_text}: the worker does not own it",
            f"chown {user_name(os.geteuid())} {root}; chmod 2710 {root}",
        )
    elif bits != 0o2710:
        yield warn(title, f"{mode_text}, not 2710", f"chmod 2710 {root}")
    else:
        yield ok(title, mode_text)


def group(site: CheckedSite) -> Iterator[CheckFinding]:
    """Check that people's Unix users are in the root's group, through which they enter it."""
    title, gid = "VIGIL_RUNS: group", site.runs.stat().st_gid
    outside = []
    for user in sorted({who.slurm_user for who in site.people or ()}):
        try:
            entry = pwd.getpwnam(user)
        except KeyError:  # reported by the check of people
            continue
        if entry.pw_uid != os.geteuid() and gid not in os.getgrouplist(user, entry.pw_gid):
            outside.append(user)
    if outside:
        add = f"usermod -aG {group_name(gid)} {outside[0]}, here and on the nodes"
        remedy = f"{add}; or chgrp it to a group that all are in."
        yield failed(title, f"{', '.join(outside[:10])}: not in {group_name(gid)}, so their jobs cannot enter", remedy)
    else:
        yield ok(title, f"{group_name(gid)}: everybody whose jobs run is in it")


def path(site: CheckedSite) -> Iterator[CheckFinding]:
    """Check that every folder above it can be entered."""
    closed = next((p for p in reversed(site.runs.parents) if not p.stat().st_mode & stat.S_IXOTH), None)
    if closed is None:
        yield ok("VIGIL_RUNS: parent folders", "open")
    else:
        remedy = f"chmod o+x {closed}, unless everybody whose jobs run is in its group."
        yield warn("VIGIL_RUNS: parent folders", f"{closed} cannot be entered by others", remedy)


def lists(site: CheckedSite) -> Iterator[CheckFinding]:
    title = "Access control lists"
    if sharing.is_possible(site.runs):
        yield ok(title, "supported")
        return
    remedy = "Mount it with POSIX ACLs (ext4, XFS, Lustre and NFS 3 have them), or set VIGIL_RUNS to one that has them."
    yield failed(title, f"the file system of {site.runs} has none: jobs of other users are refused", remedy)


def room(site: CheckedSite) -> Iterator[CheckFinding]:
    found = shutil.disk_usage(site.runs)
    room_text = f"{found.free / GIB:,.0f} of {found.total / GIB:,.0f} GiB are free"
    if found.free < MIN_FREE_BYTES:
        yield warn(
            "VIGIL_RUNS: free space", room_text, "Checkpoints are large: delete unneeded jobs, or use a larger disk."
        )
    else:
        yield ok("VIGIL_RUNS: free space", room_text)


def code(site: CheckedSite) -> Iterator[CheckFinding]:
    """Check that nodes can run Vigil's own files from the same path as here."""
    checkout = Path(__file__).resolve().parents[2]
    kind = file_system(checkout)
    place = f"{checkout} ({kind or 'unknown'})"
    if kind in NETWORK_FILE_SYSTEMS:
        yield ok("Vigil's own folder", place)
    else:
        remedy = (
            "Nodes need Vigil and its Python at the same path: put both on the shared file system, or copy them there."
        )
        yield warn("Vigil's own folder", f"{place}: a local disk", remedy)
