"""Restrict which files a run may read of what its specification names: all, or those in folders that the site lists.

A job that runs as the portal's own Unix user could open whatever that user can. So its run.toml lists where it may
read, and a file is judged by its real location once it is open: no link leads out, not even one that is swapped
meanwhile.
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
_trusted: tuple[str, ...] = ()


class OutsideRoots(PermissionError):
    """A path leads to where this run may not read."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(errno.EACCES, "it leads out of the folders that jobs may read here", os.fspath(path))


def confine(roots: Sequence[str], *, trusted: Sequence[Path]) -> None:
    """Allow this process to read data below `roots` and `trusted` only, from now on.

    `roots`: real paths. `trusted`: Vigil's own folders.
    """
    global _roots, _trusted
    _roots, _trusted = tuple(roots), tuple(map(os.fspath, trusted))


def are_set() -> bool:
    return _roots is not None


def open_file(path: str | os.PathLike[str], *, buffering: int = -1) -> BufferedReader:
    """Open a file for reading. Raises OutsideRoots if it may not be read, without having opened it."""
    if _is_unrestricted(path):
        return _reader(path, buffering)
    with _path_descriptor(path) as descriptor:
        return _reader(f"/proc/self/fd/{descriptor}", buffering)


def stat(path: str | os.PathLike[str]) -> os.stat_result:
    """Return os.stat of a path. Raises OutsideRoots if it may not be read: not even its size is revealed."""
    if _is_unrestricted(path):
        return os.stat(path)
    with _path_descriptor(path) as descriptor:
        return os.fstat(descriptor)


def is_file(path: str | os.PathLike[str]) -> bool:
    """Return whether there is a file to read. A link that leads out counts as one, whether or not its target exists.

    Opening it then only reveals that it leads out.
    """
    if not _is_unrestricted(path) and os.path.islink(path):
        try:
            check_folder(path)
        except OutsideRoots:
            return True
    return os.path.isfile(path)


def check_folder(path: str | os.PathLike[str]) -> None:
    """Raise OutsideRoots if a folder must not be listed. Its entries are judged when they are opened."""
    if not _is_unrestricted(path):
        _check(path, os.path.realpath(path))


@contextmanager
def _path_descriptor(path: str | os.PathLike[str]) -> Iterator[int]:
    """Yield a descriptor of a path inside the roots, from which nothing can be read."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        _check(path, os.path.realpath(path))  # do not even reveal that a path outside does not exist
        raise
    try:
        _check(path, os.readlink(f"/proc/self/fd/{descriptor}"))
        yield descriptor
    finally:
        os.close(descriptor)


def _is_unrestricted(path: str | os.PathLike[str]) -> bool:
    """Return whether the path may be opened without a check."""
    return _roots is None or _is_trusted(os.fspath(path))


def _reader(path: str | os.PathLike[str], buffering: int) -> BufferedReader:
    """Open a regular file. Raises OSError for others: a pipe may block forever, and a device has no end."""
    raw = FileIO(path, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))
    if not S_ISREG(os.fstat(raw.fileno()).st_mode):
        raw.close()
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    return BufferedReader(raw, DEFAULT_BUFFER_SIZE if buffering < 0 else buffering)


def _is_trusted(path: str) -> bool:
    return ".." not in Path(path).parts and _is_below(path, _trusted)


def _check(path: str | os.PathLike[str], real: str) -> None:
    assert _roots is not None
    if not _is_below(real, _roots):
        raise OutsideRoots(path)


def _is_below(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)
