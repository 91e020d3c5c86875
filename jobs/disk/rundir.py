"""Access run directories, made by the portal and filled by jobs. Everything under `job/` is untrusted.

<VIGIL_RUNS>/<project>/<id>-<6 random>/portal/   written by the portal alone
<VIGIL_RUNS>/<project>/<id>-<6 random>/job/      written by the job alone

If the job runs as another Unix user, jobs/disk/sharing.py gives that user access.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import pwd
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.conf import settings

from jobs.disk import sharing

logger = logging.getLogger(__name__)

# Setgid, so that the group passes on; nothing for the world.
PARENT_MODE = 0o2710  # root and projects: people's jobs enter through them, and nobody can list them
RUN_MODE = 0o2700  # until it is shared
FOLDER_MODE = 0o2750
JOB_FOLDER_MODE = 0o2770
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class UnsafePath(OSError):
    """Something under a run directory is not what it should be: a link, a pipe, a device, a path that leads out."""


def runs_root() -> Path:
    return Path(settings.VIGIL_RUNS)


def path_of(directory: str) -> Path:
    """Return the absolute path of a job's run directory from its row's value."""
    parts = directory.split("/")
    if len(parts) != 2 or any(part in {"", ".", ".."} for part in parts):
        raise UnsafePath(f"{directory!r} is not a run directory")
    return runs_root() / directory


def open_root() -> Path:
    """Return the run root. Make the default one under VIGIL_HOME; raise OSError if a configured one is missing.

    A configured root is never made: while its file system is not mounted, jobs would fill a disk that no node can see.
    """
    root = runs_root()
    if root == Path(settings.VIGIL_HOME) / "runs":
        _make_parent(root)
    elif not root.is_dir():
        raise OSError(errno.ENOTCONN, "VIGIL_RUNS is missing: mount its file system, or make the folder", str(root))
    elif root.stat().st_uid not in {os.geteuid(), 0}:  # its owner could swap our files
        raise OSError(
            errno.EPERM, "VIGIL_RUNS belongs to another user: chown it to the user that runs Vigil", str(root)
        )
    return root


def make(project: str, job_id: int) -> str:
    """Make a new run directory exclusively, private until it is shared. Return its path relative to the root."""
    root = open_root()
    _make_parent(root / project)
    while True:
        directory = f"{project}/{job_id}-{secrets.token_hex(3)}"
        try:
            _make_folder(root / directory, RUN_MODE)
        except FileExistsError:
            continue
        break
    _make_folder(root / directory / "portal", FOLDER_MODE)
    _make_folder(root / directory / "job", JOB_FOLDER_MODE)
    return directory


def write(path: Path, text: str, *, mode: int = 0o640) -> None:
    """Write a file of the portal's atomically: a reader sees the old or the new one.

    `mode` is the portal's own; whom the folder is shared with may read and run the file where the portal may.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), sharing.mode_of(file.fileno(), mode))
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def is_unreachable(directory: str) -> bool:
    """Return whether even its project's folder is missing, as while the file system is not mounted."""
    return not path_of(directory).parent.is_dir()


def has_checkpoint(directory: str, name: str) -> bool:
    """Return whether a run directory has a committed checkpoint of this name. Raise OSError if that is unknown."""
    try:
        os.close(open_under(path_of(directory), f"job/checkpoints/{name}/COMMITTED"))
    except FileNotFoundError:
        return False
    return True


@contextlib.contextmanager
def folder_under(root: Path, relative: str) -> Iterator[int]:
    """Open a folder below `root` component by component, refusing links. Yield its descriptor."""
    descriptor = os.open(root, OPEN_FOLDER)
    try:
        for part in parts_of(relative):
            try:
                inner = os.open(part, OPEN_FOLDER, dir_fd=descriptor)
            except NotADirectoryError:  # also for a link
                raise UnsafePath(f"{part!r} is not a folder") from None
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def open_under(root: Path, relative: str) -> int:
    """Open a regular file below `root` for reading. Raise UnsafePath, or FileNotFoundError if there is none.

    No component may be a link, so nothing outside can be reached; a FIFO does not block; a device or folder is refused.
    """
    *folders, name = parts_of(relative)
    with folder_under(root, "/".join(folders)) as folder:
        try:
            descriptor = os.open(name, _FILE, dir_fd=folder)
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.ENXIO}:  # a link; a socket, or a device without a driver
                raise UnsafePath(f"{name!r} is not a regular file") from None
            raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UnsafePath(f"{name!r} is not a regular file")
    return descriptor


def read_under(root: Path, relative: str, *, limit: int = 1 << 20) -> bytes:
    """Return the content of a small file below `root`. Raise UnsafePath beyond `limit` bytes."""
    descriptor = open_under(root, relative)
    try:
        data = b""
        while len(data) <= limit and (piece := os.read(descriptor, limit + 1 - len(data))):
            data += piece
    finally:
        os.close(descriptor)
    if len(data) > limit:
        raise UnsafePath(f"{relative!r} is larger than {limit:,} bytes")
    return data


def read_json_under(root: Path, relative: str, *, limit: int = 1 << 20) -> dict[str, Any] | None:
    """Return a JSON object that a job wrote, or None if there is none that can be read."""
    try:
        value = json.loads(read_under(root, relative, limit=limit))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def names_under(root: Path, relative: str, *, limit: int = 20_000) -> list[str]:
    """Return the names in a folder below `root`, sorted; none if it is missing or its job closed it to the portal."""
    try:
        with folder_under(root, relative) as folder, os.scandir(folder) as entries:
            return sorted(entry.name for entry, _ in zip(entries, range(limit), strict=False))
    except (FileNotFoundError, PermissionError, UnsafePath):
        return []


def parts_of(relative: str) -> list[str]:
    """Return the components of a path below a root. Raise UnsafePath for anything that could lead out."""
    parts = [part for part in relative.split("/") if part]
    if relative.startswith("/") or any(part in {".", ".."} or "\0" in part for part in parts):
        raise UnsafePath(f"{relative!r} leads out of the run directory")
    return parts


def _make_parent(path: Path) -> None:
    """Make a folder above run directories, if it is missing.

    People enter it through its group: the root's group, which everybody whose jobs run here belongs to, or that of
    VIGIL_LOCAL_USER.
    """
    try:
        _make_folder(path, PARENT_MODE)
    except FileExistsError:
        return
    if settings.VIGIL_LOCAL_USER and os.geteuid() == 0:
        with contextlib.suppress(KeyError):  # reported when the job is submitted
            os.chown(path, -1, pwd.getpwnam(settings.VIGIL_LOCAL_USER).pw_gid)
            path.chmod(PARENT_MODE)  # chown drops setgid


def _make_folder(path: Path, mode: int) -> None:
    path.mkdir(mode=0o700)
    path.chmod(mode)  # mkdir's own mode is cut by the umask
