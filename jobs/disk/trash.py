"""What is removed of run directories: out of the way by a rename at once, its bytes later.

A job filled it, and may still be at work in it: no link is followed, and neither depth nor modes are believed.
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

from jobs.disk.rundir import OPEN_FOLDER, folder_under, is_away, parts_of, path_of, runs_root
from jobs.errors import Conflict

logger = logging.getLogger(__name__)

TRASH = ".trash"
_told: set[str] = set()  # what could not be removed, and is said once


@contextlib.contextmanager
def discarded(directory: str) -> Iterator[None]:
    """Move a run directory out of the way, and back if what follows fails; `empty` removes the bytes.

    Raises Conflict where its file system is away: what lies there would be nobody's once it is back.
    """
    if not directory:
        yield
        return
    if is_away(directory):
        folder = path_of(directory).parent
        raise Conflict(
            f"Not deleted. {folder} is not there, so nothing in it can be removed: mount its file system."
            " Where it is gone for good, make the empty folder."
        )
    place, moved = path_of(directory), _made() / f"{directory.replace('/', '-')}-{secrets.token_hex(4)}"
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
    (single,) = parts_of(name)
    target = f"{directory.replace('/', '-')}-{single}-{secrets.token_hex(4)}"
    with folder_under(runs_root(), f"{directory}/job/checkpoints") as folder, folder_under(_made(), "") as into:
        os.rename(single, target, src_dir_fd=folder, dst_dir_fd=into)


def empty() -> None:
    """Remove what was discarded, and say of each thing once that it cannot be."""
    there = runs_root() / TRASH
    for entry in sorted(there.iterdir()) if there.is_dir() else ():
        try:
            _remove(entry)
        except OSError as error:
            if entry.name not in _told:
                _told.add(entry.name)
                logger.warning("%s cannot be removed; its owner, or root, can: %s", entry, error)


def _made() -> Path:
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
            if os.geteuid() != 0:  # root needs no leave
                _open_up(entry)
            shutil.rmtree(entry)
    except (RecursionError, OSError) as error:  # each level takes a frame, and a descriptor
        if isinstance(error, OSError) and error.errno != errno.EMFILE:
            raise
        _remove_deep(entry)


def _remove_deep(entry: Path) -> None:
    """A tree deeper than a stack: what is in a folder comes up to the top, until nothing has anything in it."""
    top = os.open(entry, OPEN_FOLDER)
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
        folder = os.open(name, OPEN_FOLDER, dir_fd=top)
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
