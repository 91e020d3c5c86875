"""Find the first folder that a Unix user may not enter, from modes and access control lists.

The result is how this machine sees it: on a node the user may be in other groups. So a barrier that is found here is
real, while a path without one may still be closed on a node.
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
    """A folder that keeps a user out. `is_group_only`: its group may enter, and the user is not in it."""

    path: Path
    user: str
    owner: str
    group: str
    mode: int
    action: str  # enter, write to
    is_group_only: bool

    def __str__(self) -> str:
        if self.is_group_only:
            return (
                f"{self.user} may not {self.action} {self.path}: it is open to the group {self.group},"
                f" and {self.user} is not in it."
            )
        mode = f"{self.mode:04o}, of {self.owner} and the group {self.group}"
        return f"{self.user} may not {self.action} {self.path}: its mode is {mode}."

    @property
    def remedy(self) -> str:
        """Return what somebody with the permission to do so can do about it."""
        if self.is_group_only:
            return f"usermod -aG {self.group} {self.user}, on the portal and on the nodes"
        return (
            f"chmod g+{'x' if self.action == 'enter' else 'rwx'} {self.path}, or an entry for {self.user} in its list"
        )


def barrier(path: Path, user: str, *, write: bool = False) -> Barrier | None:
    """Return the first folder on the way to `path`, or `path` itself, that keeps the user out; None if none is known.

    With `write` the user must also be able to create files in it.
    """
    try:
        entry = pwd.getpwnam(user)
        groups = set(os.getgrouplist(user, entry.pw_gid))
        for folder in (*reversed(path.parents), path):
            needs = ENTER | (WRITE if write and folder == path else 0)
            if entry.pw_uid and (denial := _check(folder, entry, groups, needs)) is not None:
                return denial
    except (KeyError, OSError, ValueError):  # an unknown user, an unreachable or closed folder, an unusual list
        return None
    return None


def _check(folder: Path, entry: pwd.struct_passwd, groups: set[int], needs: int) -> Barrier | None:
    status = folder.stat()
    mode = stat.S_IMODE(status.st_mode)
    acl = _acl(folder, mode)
    if _bits(acl, status, entry.pw_uid, groups) & needs == needs:
        return None
    return Barrier(
        path=folder,
        user=entry.pw_name,
        owner=user_name(status.st_uid),
        group=group_name(status.st_gid),
        mode=mode,
        action="write to" if needs & WRITE else "enter",
        is_group_only=status.st_gid not in groups and acl.group & needs == needs and entry.pw_uid not in acl.users,
    )


def _acl(folder: Path, mode: int) -> sharing.Acl:
    """Return the folder's access control list, or what its mode amounts to if it has none."""
    if data := sharing.read(folder):
        return sharing.parse(data)
    return sharing.Acl(owner=mode >> 6 & 0o7, group=mode >> 3 & 0o7, other=mode & 0o7)


def _bits(acl: sharing.Acl, found: os.stat_result, uid: int, groups: set[int]) -> int:
    """Return the user's permission bits in the kernel's order (acl(5)): all groups that the user is in count."""
    mask = 0o7 if acl.mask is None else acl.mask
    if uid == found.st_uid:
        return acl.owner
    if uid in acl.users:
        return acl.users[uid] & mask
    matching = [acl.group] if found.st_gid in groups else []
    matching += [bits for gid, bits in acl.groups.items() if gid in groups]
    if not matching:
        return acl.other
    together = 0
    for bits in matching:
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
