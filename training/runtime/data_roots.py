"""Which files a run may read of what its specification names: all, or those in folders that the site has named.

A job that runs as the portal's own Unix user could open whatever that user can. So its run.toml says where it may read,
and a file is judged by where it really lies once it is held: no link leads out, nor one that is swapped meanwhile.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import DEFAULT_BUFFER_SIZE, BufferedReader, FileIO
from pathlib import Path
from stat import S_ISREG

_roots: tuple[str, ...] | None = None
_own: tuple[str, ...] = ()


class OutsideRoots(PermissionError):
    """A path leads to where this run may not read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(errno.EACCES, "it leads out of the folders that jobs may read here", os.fspath(path))


def confine(roots: Sequence[str], *, own: Sequence[Path]) -> None:
    """Lets this process read data below `roots` alone from now on, which are real paths; and below `own`, where Vigil
    keeps what it made itself."""
    global _roots, _own
    _roots, _own = tuple(roots), tuple(map(os.fspath, own))


def are_set() -> bool:
    return _roots is not None


def open_file(path: str | os.PathLike[str], *, buffering: int = -1) -> BufferedReader:
    """A file for reading. OutsideRoots where it may not be read; nothing of it was opened then."""
    if _is_open(path):
        return _reader(path, buffering)
    with _held(path) as held:
        return _reader(f"/proc/self/fd/{held}", buffering)


def stat(path: str | os.PathLike[str]) -> os.stat_result:
    """What os.stat says of it. OutsideRoots where it may not be read: how large it is, say, is not to be told."""
    if _is_open(path):
        return os.stat(path)
    with _held(path) as held:
        return os.fstat(held)


def is_file(path: str | os.PathLike[str]) -> bool:
    """Whether there is a file to read. A link that leads out counts as one, whether there is anything behind it or
    not: whoever opens it is told that it leads out, and no more."""
    if not _is_open(path) and os.path.islink(path):
        try:
            check_folder(path)
        except OutsideRoots:
            return True
    return os.path.isfile(path)


def check_folder(path: str | os.PathLike[str]) -> None:
    """OutsideRoots where the names in it are not to be listed. What they name is judged as it is opened."""
    if not _is_open(path):
        _check(path, os.path.realpath(path))


@contextmanager
def _held(path: str | os.PathLike[str]) -> Iterator[int]:
    """A descriptor of what lies in the roots, with which nothing can be read."""
    try:
        held = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        _check(path, os.path.realpath(path))  # of what is outside, not even that it is not there
        raise
    try:
        _check(path, os.readlink(f"/proc/self/fd/{held}"))
        yield held
    finally:
        os.close(held)


def _is_open(path: str | os.PathLike[str]) -> bool:
    """Whether it may be opened as it is."""
    return _roots is None or _is_own(os.fspath(path))


def _reader(path: str | os.PathLike[str], buffering: int) -> BufferedReader:
    """OSError where it is no plain file: nobody may ever write to a pipe, and a device has no end."""
    raw = FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not S_ISREG(os.fstat(raw.fileno()).st_mode):
        raw.close()
        raise OSError(errno.EINVAL, "it is no plain file", os.fspath(path))
    return BufferedReader(raw, DEFAULT_BUFFER_SIZE if buffering < 0 else buffering)


def _is_own(path: str) -> bool:
    return ".." not in Path(path).parts and _lies_in(path, _own)


def _check(path: str | os.PathLike[str], real: str) -> None:
    assert _roots is not None
    if not _lies_in(real, _roots):
        raise OutsideRoots(path)


def _lies_in(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)
