"""Run directories: made by us, filled by jobs. Everything under `job/` is hostile: one function opens it.

<VIGIL_RUNS>/<project>/<id>-<6 random>/portal/   written by the portal alone
<VIGIL_RUNS>/<project>/<id>-<6 random>/job/      written by the job alone
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import pwd
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from django.conf import settings

FOLDER = 0o2750  # setgid, so that the group passes on; nothing for the world
JOB_FOLDER = 0o2770
TRASH = ".trash"
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


def make(project: str, job_id: int) -> str:
    """A new run directory, made exclusively; answers its path relative to the root."""
    root = runs_root()
    _make_folder(root, FOLDER, exist_ok=True)
    _make_folder(root / project, FOLDER, exist_ok=True)
    while True:
        directory = f"{project}/{job_id}-{secrets.token_hex(3)}"
        try:
            _make_folder(root / directory, FOLDER)
        except FileExistsError:
            continue
        break
    _make_folder(root / directory / "portal", FOLDER)
    _make_folder(root / directory / "job", JOB_FOLDER)
    give(root / directory / "job")
    return directory


def give(path: Path) -> None:
    """Hand a folder or file to the Unix user that jobs run as, where that is another one (VIGIL_LOCAL_USER)."""
    if settings.VIGIL_LOCAL_USER and os.geteuid() == 0:
        user = pwd.getpwnam(settings.VIGIL_LOCAL_USER)
        os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)


def write(path: Path, text: str, *, mode: int = 0o640) -> None:
    """Write a file of ours whole or not at all: a reader sees the old or the new one."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if settings.VIGIL_LOCAL_USER and os.geteuid() == 0:
            _let_read(temporary, mode)
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

    FileNotFoundError where there is none; PermissionError where the job did not let the portal's group write.
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
    """Remove what was discarded."""
    trash = runs_root() / TRASH
    for entry in sorted(trash.iterdir()) if trash.is_dir() else ():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
            if entry.exists() and os.geteuid() != 0:  # root needs no leave, and must not be led by a link
                _open_up(entry)
                shutil.rmtree(entry, ignore_errors=True)
        else:  # a job may call anything a checkpoint
            with contextlib.suppress(OSError):
                entry.unlink()


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


def _make_folder(path: Path, mode: int, *, exist_ok: bool = False) -> None:
    try:
        path.mkdir(parents=False)
    except FileNotFoundError:
        path.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        if exist_ok:
            return
        raise
    path.chmod(mode)  # mkdir's own mode is cut by the umask
    if settings.VIGIL_LOCAL_USER and os.geteuid() == 0:
        os.chown(path, -1, pwd.getpwnam(settings.VIGIL_LOCAL_USER).pw_gid)
        path.chmod(mode)  # chown drops setgid


def _open_up(folder: Path) -> None:
    """Give ourselves leave to remove what is in it: some programs take it away from their own user, as git-annex."""
    with contextlib.suppress(OSError):
        folder.chmod(0o700)
    for inside, names, _ in os.walk(folder):
        for path in (Path(inside, name) for name in names):
            if not path.is_symlink():
                with contextlib.suppress(OSError):
                    path.chmod(0o700)


def _let_read(path: Path, mode: int) -> None:
    """Let the jobs' Unix user read what we wrote for it; what only the owner may read becomes its own."""
    user = pwd.getpwnam(settings.VIGIL_LOCAL_USER)
    os.chown(path, user.pw_uid if mode & 0o077 == 0 else -1, user.pw_gid)
