"""Remove run directories and checkpoints: a rename moves them out of the way at once, their bytes go later.

A job filled them, and may still be writing: no link is followed, and neither depth nor modes are trusted.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from jobs.disk.rundir import OPEN_FOLDER, folder_under, is_unreachable, parts_of, path_of, runs_root
from jobs.errors import Conflict

logger = logging.getLogger(__name__)

TRASH = ".trash"
_reported: set[str] = set()  # entries that could not be deleted, each logged once


@contextlib.contextmanager
def moved_to_trash(directory: str) -> Iterator[None]:
    """Move a run directory to the trash, and back if the caller's block fails; `empty` deletes the bytes.

    Raises Conflict if its file system is unreachable: its content would belong to no job once it is back.
    """
    if not directory:
        yield
        return
    if is_unreachable(directory):
        folder = path_of(directory).parent
        raise Conflict(
            f"Not deleted. {folder} is missing, so nothing in it can be deleted: mount its file system."
            " If it is gone for good, make the empty folder."
        )
    place, moved = path_of(directory), _trash_folder() / f"{directory.replace('/', '-')}-{secrets.token_hex(4)}"
    with contextlib.suppress(FileNotFoundError):
        os.rename(place, moved)
    try:
        yield
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.rename(moved, place)
        raise


def discard_checkpoint(directory: str, name: str) -> None:
    """Move one of a job's checkpoints to the trash, by its name alone: no link on the way is followed.

    Raises FileNotFoundError if there is none, PermissionError if the job closed it to the portal.
    """
    (single,) = parts_of(name)
    target = f"{directory.replace('/', '-')}-{single}-{secrets.token_hex(4)}"
    with folder_under(runs_root(), f"{directory}/job/checkpoints") as folder, folder_under(_trash_folder(), "") as into:
        os.rename(single, target, src_dir_fd=folder, dst_dir_fd=into)


def empty() -> None:
    """Delete the content of the trash, and log once for each entry that it cannot be deleted."""
    there = runs_root() / TRASH
    for entry in sorted(there.iterdir()) if there.is_dir() else ():
        try:
            _remove(entry)
        except OSError as error:
            if entry.name not in _reported:
                _reported.add(entry.name)
                logger.warning("%s cannot be removed; its owner, or root, can: %s", entry, error)


def _trash_folder() -> Path:
    path = runs_root() / TRASH
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def _remove(entry: Path) -> None:
    if entry.is_symlink() or not entry.is_dir():  # a job may call anything a checkpoint
        entry.unlink(missing_ok=True)
        return
    try:
        shutil.rmtree(entry, ignore_errors=True)
        if os.path.lexists(entry):
            if os.geteuid() != 0:  # root needs no permission
                _make_accessible(entry)
            shutil.rmtree(entry)
    except (RecursionError, OSError) as error:  # each level uses a stack frame and a descriptor
        if isinstance(error, OSError) and error.errno != errno.EMFILE:
            raise
        _remove_deep(entry)


def _remove_deep(entry: Path) -> None:
    """Delete a tree deeper than the stack: lift everything in a folder to the top until all folders are empty."""
    top = os.open(entry, OPEN_FOLDER)
    try:
        while names := os.listdir(top):
            for name in names:
                _lift(name, top)
    finally:
        os.close(top)
    os.rmdir(entry)


def _lift(name: str, top: int) -> None:
    """Delete an entry of `top`; if it is a folder, move its content up into `top` first."""
    try:
        folder = os.open(name, OPEN_FOLDER, dir_fd=top)
    except NotADirectoryError:  # also for a link
        os.unlink(name, dir_fd=top)
        return
    try:
        for inner in os.listdir(folder):
            os.rename(inner, secrets.token_hex(16), src_dir_fd=folder, dst_dir_fd=top)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=top)


def _make_accessible(folder: Path) -> None:
    """Make folders writable that some programs, such as git-annex, close to their own user.

    Only our own folders can be opened; a process of its job may still be writing, so no link is followed.
    """
    _make_folder_accessible(os.fspath(folder), None)
    for _, names, _, inside in os.fwalk(folder, follow_symlinks=False):
        for name in names:
            _make_folder_accessible(name, inside)


def _make_folder_accessible(name: str, inside: int | None) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=inside)
        try:
            os.chmod(f"/proc/self/fd/{descriptor}", 0o700)
        finally:
            os.close(descriptor)
