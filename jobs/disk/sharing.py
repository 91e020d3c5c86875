"""Share run directories with the Unix user whose job works in them, by POSIX access control lists.

    <run>/    the user: enter and list; nobody else but the portal, whatever group they are in
    portal/   the user: read what is there and what will be written
    job/      the user and the portal: everything, in all that is made inside, however deep and by whom

Lists are extended attributes in the kernel's own format, so this needs no library and no other program.

The group bits of a file that has a list are its *mask*: they limit what the list grants to users. So the umask takes
nothing away in these folders, but an explicit `chmod 600` or `mkdir(mode=0o700)` does, and only its owner can undo it.
"""

from __future__ import annotations

import errno
import os
import pwd
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jobs.errors import Refused

ACCESS, DEFAULT = "system.posix_acl_access", "system.posix_acl_default"
READ, READ_ENTER, EVERYTHING = 0o4, 0o5, 0o7
# linux/posix_acl_xattr.h: a version, then entries of tag, permissions and id, in the order of their tags.
_HEADER, _ENTRY, _VERSION, _NO_ID = struct.Struct("<I"), struct.Struct("<HHI"), 2, 0xFFFFFFFF
_OWNER, _USER, _GROUP_OWNER, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20


@dataclass(frozen=True)
class Acl:
    """An access list: who may do what, in bits (4 read, 2 write, 1 enter or run).

    Users and groups are by number. `mask`: None for none.
    """

    owner: int = EVERYTHING
    group: int = 0
    other: int = 0
    users: Mapping[int, int] = field(default_factory=dict)
    groups: Mapping[int, int] = field(default_factory=dict)
    mask: int | None = None


def share(run: Path, user: str) -> None:
    """Give the Unix user that its job runs as access to a run directory. "" is the portal's own user: nothing to do.

    It replaces any earlier lists, so it may be repeated, and with another user. Raises Refused, with the remedy, if
    there is no such user or the file system has no access control lists.
    """
    if not user or (person := _uid(user)) == os.geteuid():
        return
    everything = _acl_of({os.geteuid(): EVERYTHING, person: EVERYTHING})
    reading = _acl_of({person: READ_ENTER})
    for folder, access, default in (
        (run / "job", everything, everything),
        (run / "portal", reading, reading),
        (run, reading, None),  # the last: until then the others cannot be reached
    ):
        try:
            _set(folder, ACCESS, pack(access))
            if default is not None:
                _set(folder, DEFAULT, pack(default))
        except OSError as error:
            if error.errno != errno.ENOTSUP:
                raise
            reason = (
                f"The file system of {folder} has no access control lists, so access cannot be granted to {user} alone."
            )
            remedy = "Mount it with POSIX ACLs (ext4, XFS, Lustre and NFS 3 have them), or move VIGIL_RUNS."
            raise Refused(reason, remedy) from None


def is_possible(folder: Path) -> bool:
    """Return whether its file system has access control lists."""
    try:
        os.getxattr(folder, DEFAULT)
    except OSError as error:
        return error.errno != errno.ENOTSUP
    return True


def share_like(neighbour: Path, grown: Path) -> None:
    """Give a tree that was built in private the access that it would have got next to `neighbour`'s entries."""
    listed = _get(neighbour, DEFAULT)
    if not listed:
        return
    _set(grown, DEFAULT, listed)
    _set(grown, ACCESS, listed)
    for folder, folders, files in os.walk(grown):
        for path in (Path(folder, name) for name in (*folders, *files)):
            if path.is_symlink():
                continue
            mode = path.stat().st_mode & 0o7777
            _set(path, ACCESS, listed)
            if path.is_dir():
                _set(path, DEFAULT, listed)
            path.chmod(mode & 0o7707 | (mode & 0o700) >> 3)


def mode_of(descriptor: int, mode: int) -> int:
    """Return the mode that lets the folder's user read a file of the portal's, and nobody else.

    Its group bits are those of the list that it inherited, which grants the group nothing; without a list: as it is.
    """
    return mode | (mode & 0o500) >> 3 if _get(descriptor, ACCESS) else mode


def read(folder: Path) -> bytes:
    """Return the folder's access control list in the kernel's format; b"" if only its mode counts."""
    return _get(folder, ACCESS)


def pack(acl: Acl) -> bytes:
    entries = [(_OWNER, acl.owner, _NO_ID)]
    entries += [(_USER, bits, uid) for uid, bits in sorted(acl.users.items())]
    entries.append((_GROUP_OWNER, acl.group, _NO_ID))
    entries += [(_GROUP, bits, gid) for gid, bits in sorted(acl.groups.items())]
    entries += [(_MASK, acl.mask, _NO_ID)] if acl.mask is not None else []
    entries.append((_OTHER, acl.other, _NO_ID))
    return _HEADER.pack(_VERSION) + b"".join(_ENTRY.pack(*entry) for entry in entries)


def parse(data: bytes) -> Acl:
    """Parse a list in the kernel's format. Raises ValueError if it is none of this format."""
    if len(data) < _HEADER.size or _HEADER.unpack_from(data) != (_VERSION,) or (len(data) - 4) % _ENTRY.size:
        raise ValueError("not an access control list of version 2")
    entries = list(_ENTRY.iter_unpack(data[_HEADER.size :]))
    single = {tag: bits for tag, bits, _ in entries if tag not in {_USER, _GROUP}}
    if not {_OWNER, _GROUP_OWNER, _OTHER} <= single.keys() <= {_OWNER, _GROUP_OWNER, _MASK, _OTHER}:
        raise ValueError("not an access control list: owner, group and others belong in it")
    return Acl(
        owner=single[_OWNER],
        group=single[_GROUP_OWNER],
        other=single[_OTHER],
        users={number: bits for tag, bits, number in entries if tag == _USER},
        groups={number: bits for tag, bits, number in entries if tag == _GROUP},
        mask=single.get(_MASK),
    )


def _acl_of(users: Mapping[int, int]) -> Acl:
    mask = 0
    for bits in users.values():
        mask |= bits
    return Acl(users=users, mask=mask)


def _uid(user: str) -> int:
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        reason = f"The portal's machine has no Unix user {user}."
        remedy = "Give it the same users as the nodes (sssd, LDAP), or correct the owner's Slurm user."
        raise Refused(reason, remedy) from None


def _get(place: Path | int, name: str) -> bytes:
    """Return the extended attribute; b"" if there is none, or none is possible."""
    try:
        return os.getxattr(place, name)
    except OSError as error:
        if error.errno in {errno.ENODATA, errno.ENOTSUP}:
            return b""
        raise


def _set(path: Path, name: str, value: bytes) -> None:
    os.setxattr(path, name, value, follow_symlinks=False)
