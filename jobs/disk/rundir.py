"""Run directories: made by us, filled by jobs. Everything under `job/` is hostile: one function opens it.

<VIGIL_RUNS>/<project>/<id>-<6 random>/portal/   written by the portal alone
<VIGIL_RUNS>/<project>/<id>-<6 random>/job/      written by the job alone

Where the job runs as another Unix user, jobs/disk/sharing.py lets that one in.
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
WAY = 0o2710  # the root and the projects: people's jobs go through to their own, and nobody can list them
RUN = 0o2700  # until it is shared
FOLDER = 0o2750
JOB_FOLDER = 0o2770
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Unsafe(OSError):
    """Something under a run directory is not what it should be: a link, a pipe, a device, a path that leads out."""


def runs_root() -> Path:
    return Path(settings.VIGIL_RUNS)


def path_of(directory: str) -> Path:
    """The absolute path of a job's run directory, from what the job's row says."""
    parts = directory.split("/")
    if len(parts) != 2 or any(part in {"", ".", ".."} for part in parts):
        raise Unsafe(f"{directory!r} is not a run directory")
    return runs_root() / directory


def open_root() -> Path:
    """The run root, made where it is the default, under VIGIL_HOME; OSError where a configured one is not there.

    That one is never made: while its file system is not mounted, jobs would fill a disk that no node can see.
    """
    root = runs_root()
    if root == Path(settings.VIGIL_HOME) / "runs":
        _make_way(root)
    elif not root.is_dir():
        raise OSError(errno.ENOTCONN, "VIGIL_RUNS is not there: mount its file system, or make the folder", str(root))
    elif root.stat().st_uid not in {os.geteuid(), 0}:  # whose it is may swap what we write, as scripts that others run
        raise OSError(
            errno.EPERM, "VIGIL_RUNS is somebody else's folder: chown it to the user that runs Vigil", str(root)
        )
    return root


def make(project: str, job_id: int) -> str:
    """A new run directory, made exclusively, our own until it is shared; answers its path relative to the root."""
    root = open_root()
    _make_way(root / project)
    while True:
        directory = f"{project}/{job_id}-{secrets.token_hex(3)}"
        try:
            _make_folder(root / directory, RUN)
        except FileExistsError:
            continue
        break
    _make_folder(root / directory / "portal", FOLDER)
    _make_folder(root / directory / "job", JOB_FOLDER)
    return directory


def write(path: Path, text: str, *, mode: int = 0o640) -> None:
    """Write a file of ours whole or not at all: a reader sees the old or the new one.

    `mode` is that of our own; whom the folder is shared with may read it, and run it, where we may.
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


def is_away(directory: str) -> bool:
    """Whether even its project's folder is missing: then the file system is, and says nothing of what it holds."""
    return not path_of(directory).parent.is_dir()


def has_checkpoint(directory: str, name: str) -> bool:
    """Whether a run directory holds a committed checkpoint of this name; OSError where that cannot be told."""
    try:
        os.close(open_under(path_of(directory), f"job/checkpoints/{name}/COMMITTED"))
    except FileNotFoundError:
        return False
    return True


@contextlib.contextmanager
def folder_under(root: Path, relative: str) -> Iterator[int]:
    """A descriptor of a folder below `root`, each component opened by itself and none of them a link."""
    descriptor = os.open(root, OPEN_FOLDER)
    try:
        for part in parts_of(relative):
            try:
                inner = os.open(part, OPEN_FOLDER, dir_fd=descriptor)
            except NotADirectoryError:  # a link, too
                raise Unsafe(f"{part!r} is not a folder") from None
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)


def open_under(root: Path, relative: str) -> int:
    """A descriptor for reading a regular file below `root`, or Unsafe; FileNotFoundError where there is none.

    No component may be a link, so nothing outside can be reached; a FIFO does not block; a device or folder is refused.
    """
    *folders, name = parts_of(relative)
    with folder_under(root, "/".join(folders)) as folder:
        try:
            descriptor = os.open(name, _FILE, dir_fd=folder)
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.ENXIO}:  # a link; a socket, or a device without a driver
                raise Unsafe(f"{name!r} is not a regular file") from None
            raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Unsafe(f"{name!r} is not a regular file")
    return descriptor


def read_under(root: Path, relative: str, *, limit: int = 1 << 20) -> bytes:
    """The whole of a small file below `root`; more than `limit` bytes is Unsafe."""
    descriptor = open_under(root, relative)
    try:
        data = b""
        while len(data) <= limit and (piece := os.read(descriptor, limit + 1 - len(data))):
            data += piece
    finally:
        os.close(descriptor)
    if len(data) > limit:
        raise Unsafe(f"{relative!r} is larger than {limit:,} bytes")
    return data


def read_json_under(root: Path, relative: str, *, limit: int = 1 << 20) -> dict[str, Any] | None:
    """A JSON object that a job wrote, or None where there is none that can be read."""
    try:
        value = json.loads(read_under(root, relative, limit=limit))
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def names_under(root: Path, relative: str, *, limit: int = 20_000) -> list[str]:
    """The names in a folder below `root`, sorted; none where it is absent, or its job does not let us in."""
    try:
        with folder_under(root, relative) as folder, os.scandir(folder) as entries:
            return sorted(entry.name for entry, _ in zip(entries, range(limit), strict=False))
    except (FileNotFoundError, PermissionError, Unsafe):
        return []


def parts_of(relative: str) -> list[str]:
    """The components of a path below a root; anything that could lead out is Unsafe."""
    parts = [part for part in relative.split("/") if part]
    if relative.startswith("/") or any(part in {".", ".."} or "\0" in part for part in parts):
        raise Unsafe(f"{relative!r} leads out of the run directory")
    return parts


def _make_way(path: Path) -> None:
    """A folder that leads to run directories, if it is not there yet. People go through it by its group: that of the
    root, to which all belong whose jobs run here, or that of VIGIL_LOCAL_USER."""
    try:
        _make_folder(path, WAY)
    except FileExistsError:
        return
    if settings.VIGIL_LOCAL_USER and os.geteuid() == 0:
        with contextlib.suppress(KeyError):  # said where the job is handed over
            os.chown(path, -1, pwd.getpwnam(settings.VIGIL_LOCAL_USER).pw_gid)
            path.chmod(WAY)  # chown drops setgid


def _make_folder(path: Path, mode: int) -> None:
    path.mkdir(mode=0o700)
    path.chmod(mode)  # mkdir's own mode is cut by the umask
