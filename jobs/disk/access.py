"""Whether a Unix user gets to a place, read off modes and access lists, and the first folder that does not let them.

What is told is how this machine sees it: a node may know the user in other groups. So it names what is closed here,
and of what is open here claims nothing.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from dataclasses import dataclass
from pathlib import Path

from jobs.disk import sharing

READ, WRITE, ENTER = 0o4, 0o2, 0o1


@dataclass(frozen=True)
class Barrier:
    """A place that does not let somebody do what they must. `is_groups`: its group may, and they are not in it."""

    path: Path
    user: str
    owner: str
    group: str
    mode: int
    does: str  # enter, write to
    is_groups: bool

    def __str__(self) -> str:
        if self.is_groups:
            return (
                f"{self.user} may not {self.does} {self.path}: it is open to the group {self.group},"
                f" and {self.user} is not in it."
            )
        whose = f"{self.mode:04o}, of {self.owner} and the group {self.group}"
        return f"{self.user} may not {self.does} {self.path}: its mode is {whose}."

    @property
    def remedy(self) -> str:
        """What somebody with the right to can do."""
        if self.is_groups:
            return f"usermod -aG {self.group} {self.user}, on the portal and on the nodes"
        return f"chmod g+{'x' if self.does == 'enter' else 'rwx'} {self.path}, or an entry for {self.user} in its list"


def barrier(path: Path, user: str, *, write: bool = False) -> Barrier | None:
    """The first folder on the way to and at `path` that keeps the user out; None where nothing does, or nobody knows.

    `write`: they must make files in it, too.
    """
    try:
        entry = pwd.getpwnam(user)
        groups = set(os.getgrouplist(user, entry.pw_gid))
        for folder in (*reversed(path.parents), path):
            needs = ENTER | (WRITE if write and folder == path else 0)
            if entry.pw_uid and (found := _look(folder, entry, groups, needs)) is not None:
                return found
    except (KeyError, OSError, ValueError):  # an unknown user, a place that is away or closed to us, an odd list
        return None
    return None


def _look(folder: Path, entry: pwd.struct_passwd, groups: set[int], needs: int) -> Barrier | None:
    found = folder.stat()
    mode = stat.S_IMODE(found.st_mode)
    acl = _acl(folder, mode)
    if _bits(acl, found, entry.pw_uid, groups) & needs == needs:
        return None
    return Barrier(
        path=folder,
        user=entry.pw_name,
        owner=user_name(found.st_uid),
        group=group_name(found.st_gid),
        mode=mode,
        does="write to" if needs & WRITE else "enter",
        is_groups=found.st_gid not in groups and acl.group & needs == needs and entry.pw_uid not in acl.users,
    )


def _acl(folder: Path, mode: int) -> sharing.Acl:
    """Its list; without one what its mode says."""
    if data := sharing.read(folder):
        return sharing.parse(data)
    return sharing.Acl(owner=mode >> 6 & 0o7, group=mode >> 3 & 0o7, other=mode & 0o7)


def _bits(acl: sharing.Acl, found: os.stat_result, uid: int, groups: set[int]) -> int:
    """What the user may, in the kernel's order (acl(5)): of groups every one that they are in counts."""
    mask = 0o7 if acl.mask is None else acl.mask
    if uid == found.st_uid:
        return acl.owner
    if uid in acl.users:
        return acl.users[uid] & mask
    own = [acl.group] if found.st_gid in groups else []
    own += [bits for gid, bits in acl.groups.items() if gid in groups]
    if not own:
        return acl.other
    together = 0
    for bits in own:
        together |= bits & mask
    return together


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
