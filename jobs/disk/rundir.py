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
import shutil
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
TRASH = ".trash"
_told: set[str] = set()  # of the trash, what could not be removed, and is said once
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
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


@contextlib.contextmanager
def discarded(directory: str) -> Iterator[None]:
    """Move a run directory out of the way, and back if what follows fails; `empty_trash` removes the bytes."""
    if not directory:
        yield
        return
    trash = runs_root() / TRASH
    trash.mkdir(mode=0o700, exist_ok=True)
    place, moved = path_of(directory), trash / f"{directory.replace('/', '-')}-{secrets.token_hex(4)}"
    with contextlib.suppress(FileNotFoundError):
        os.rename(place, moved)
    try:
        yield
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.rename(moved, place)
        raise


def discard_checkpoint(directory: str, name: str) -> None:
    """Move one of a job's checkpoints out of the way, by its name alone: no link on the way is followed.

    FileNotFoundError where there is none; PermissionError where the job closed it to us.
    """
    trash = runs_root() / TRASH
    trash.mkdir(mode=0o700, exist_ok=True)
    (single,) = _parts(name)
    target = f"{directory.replace('/', '-')}-{single}-{secrets.token_hex(4)}"
    with folder_under(runs_root(), f"{directory}/job/checkpoints") as folder, folder_under(trash, "") as into:
        os.rename(single, target, src_dir_fd=folder, dst_dir_fd=into)


def has_checkpoint(directory: str, name: str) -> bool:
    """Whether a run directory holds a committed checkpoint of this name; OSError where that cannot be told."""
    try:
        os.close(open_under(path_of(directory), f"job/checkpoints/{name}/COMMITTED"))
    except FileNotFoundError:
        return False
    return True


def empty_trash() -> None:
    """Remove what was discarded, and say of each thing once that it cannot be."""
    trash = runs_root() / TRASH
    for entry in sorted(trash.iterdir()) if trash.is_dir() else ():
        try:
            _remove(entry)
        except OSError as error:
            if entry.name not in _told:
                _told.add(entry.name)
                logger.warning("%s cannot be removed; its owner, or root, can: %s", entry, error)


@contextlib.contextmanager
def folder_under(root: Path, relative: str) -> Iterator[int]:
    """A descriptor of a folder below `root`, each component opened by itself and none of them a link."""
    descriptor = os.open(root, _DIRECTORY)
    try:
        for part in _parts(relative):
            try:
                inner = os.open(part, _DIRECTORY, dir_fd=descriptor)
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
    *folders, name = _parts(relative)
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


def _parts(relative: str) -> list[str]:
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


def _remove(entry: Path) -> None:
    if entry.is_symlink() or not entry.is_dir():  # a job may call anything a checkpoint
        entry.unlink(missing_ok=True)
        return
    try:
        shutil.rmtree(entry, ignore_errors=True)
        if os.path.lexists(entry):
            if os.geteuid() != 0:  # root needs no leave
                _open_up(entry)
            shutil.rmtree(entry)
    except (RecursionError, OSError) as error:  # each level takes a frame, and a descriptor
        if isinstance(error, OSError) and error.errno != errno.EMFILE:
            raise
        _remove_deep(entry)


def _remove_deep(entry: Path) -> None:
    """A tree deeper than a stack: what is in a folder comes up to the top, until nothing has anything in it."""
    top = os.open(entry, _DIRECTORY)
    try:
        while names := os.listdir(top):
            for name in names:
                _lift(name, top)
    finally:
        os.close(top)
    os.rmdir(entry)


def _lift(name: str, top: int) -> None:
    """Remove something from a folder, having moved the folders in it up into that one."""
    try:
        folder = os.open(name, _DIRECTORY, dir_fd=top)
    except NotADirectoryError:  # a link, too
        os.unlink(name, dir_fd=top)
        return
    try:
        for inner in os.listdir(folder):
            os.rename(inner, secrets.token_hex(16), src_dir_fd=folder, dst_dir_fd=top)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=top)


def _open_up(folder: Path) -> None:
    """Give ourselves leave to remove what is in it: some programs take it away from their own user, as git-annex.

    Only what is ours can be opened; a process of its job may still be at work in it, so no link is followed.
    """
    _open_one(os.fspath(folder), None)
    for _, names, _, inside in os.fwalk(folder, follow_symlinks=False):
        for name in names:
            _open_one(name, inside)


def _open_one(name: str, inside: int | None) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)
        try:
            os.chmod(f"/proc/self/fd/{descriptor}", 0o700)
        finally:
            os.close(descriptor)
