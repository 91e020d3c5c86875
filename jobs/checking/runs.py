"""The run root: on the disk that portal and nodes share, open to nobody but those whose jobs go through it."""

from __future__ import annotations

import os
import pwd
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from jobs.checking.finding import Finding, bad, ok, warn
from jobs.checking.site import Site
from jobs.disk import sharing
from jobs.disk.access import group_name, user_name
from portal.run.file_systems import NETWORK_FILE_SYSTEMS, file_system

LITTLE = 50 * 1024**3
GIB = 1024**3
MAKE = "install -d -o {owner} -g GROUP -m 2710 {root}"


def there(site: Site) -> Iterator[Finding]:
    title, root = "VIGIL_RUNS", site.runs
    me = pwd.getpwuid(os.geteuid()).pw_name
    if not root.is_dir():
        remedy = f"Mount its file system, or make it: {MAKE.format(owner=me, root=root)}"
        yield bad(title, f"{root} is not there", remedy)
        return
    if not os.access(root, os.R_OK | os.W_OK | os.X_OK):
        yield bad(title, f"{root} cannot be written by {me}", f"chown {me} {root}")
        return
    yield ok(title, str(root))
    kind = file_system(root)
    if kind in NETWORK_FILE_SYSTEMS:
        yield ok("Its file system", f"{kind}: shared")
    else:
        remedy = (
            "Put VIGIL_RUNS where the nodes find it at the same path. If this machine exports it to them, all is well."
        )
        yield warn("Its file system", f"{kind or 'unknown'}: a local disk", remedy)


def mode(site: Site) -> Iterator[Finding]:
    title, root = "Its mode", site.runs
    found = root.stat()
    bits, group = stat.S_IMODE(found.st_mode), group_name(found.st_gid)
    seen = f"{bits:04o}, of {user_name(found.st_uid)} and group {group}"
    if bits & stat.S_IRWXO:
        yield bad(title, f"{seen}: everybody may look into it", f"chmod 2710 {root}")
    elif not bits & stat.S_IXGRP:
        yield bad(title, f"{seen}: nobody's job can go through it", f"chmod 2710 {root}")
    elif found.st_uid != os.geteuid():
        yield warn(
            title,
            f"{seen}: it is not the worker's",
            f"chown {user_name(os.geteuid())} {root}; chmod 2710 {root}",
        )
    elif bits != 0o2710:
        yield warn(title, f"{seen}, not 2710", f"chmod 2710 {root}")
    else:
        yield ok(title, seen)


def group(site: Site) -> Iterator[Finding]:
    """Whether people's Unix users are in the root's group, by which they go through it."""
    title, gid = "Its group", site.runs.stat().st_gid
    outside = []
    for user in sorted({who.slurm_user for who in site.people or ()}):
        try:
            entry = pwd.getpwnam(user)
        except KeyError:  # said of the person
            continue
        if entry.pw_uid != os.geteuid() and gid not in os.getgrouplist(user, entry.pw_gid):
            outside.append(user)
    if outside:
        add = f"usermod -aG {group_name(gid)} {outside[0]}, here and on the nodes"
        remedy = f"{add}; or chgrp it to a group that all are in."
        yield bad(title, f"{', '.join(outside[:10])}: not in {group_name(gid)}, so their jobs cannot enter", remedy)
    else:
        yield ok(title, f"{group_name(gid)}: all whose jobs run are in it")


def ways(site: Site) -> Iterator[Finding]:
    """Every folder above it has to let people through."""
    closed = next((p for p in reversed(site.runs.parents) if not p.stat().st_mode & stat.S_IXOTH), None)
    if closed is None:
        yield ok("The way to it", "open")
    else:
        remedy = f"chmod o+x {closed}, unless its group lets everybody through whose jobs run."
        yield warn("The way to it", f"{closed} is closed to others", remedy)


def lists(site: Site) -> Iterator[Finding]:
    title = "Access control lists"
    if sharing.is_possible(site.runs):
        yield ok(title, "kept")
        return
    remedy = "Mount it with POSIX ACLs (ext4, XFS, Lustre, NFS 3 have them), or set VIGIL_RUNS to one that has."
    yield bad(title, f"the file system of {site.runs} keeps none: other people's jobs are refused", remedy)


def room(site: Site) -> Iterator[Finding]:
    found = shutil.disk_usage(site.runs)
    seen = f"{found.free / GIB:,.0f} of {found.total / GIB:,.0f} GiB are free"
    if found.free < LITTLE:
        yield warn(
            "Room for runs", seen, "Checkpoints are large: delete jobs that nobody needs, or take a larger disk."
        )
    else:
        yield ok("Room for runs", seen)


def code(site: Site) -> Iterator[Finding]:
    """Nodes run Vigil's own files, from the same path as here."""
    checkout = Path(__file__).resolve().parents[2]
    kind = file_system(checkout)
    seen = f"{checkout} ({kind or 'unknown'})"
    if kind in NETWORK_FILE_SYSTEMS:
        yield ok("Vigil's own folder", seen)
    else:
        remedy = (
            "Nodes need Vigil and its Python at the same path: put both on the shared file system, or copy them there."
        )
        yield warn("Vigil's own folder", f"{seen}: a local disk", remedy)
