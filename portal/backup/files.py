"""Create folders and files that the next backup removes if this one is killed: a running process holds their lock."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Literal

FIRST_PROGRESS_S = 3.0
PROGRESS_EVERY_S = 5.0


class ProgressMessages:
    """Print progress on standard error once something takes a while."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.next = time.monotonic() + FIRST_PROGRESS_S

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self.next:
            self.next = now + PROGRESS_EVERY_S
            share = f"{done / total:.0%} of {total / 1e9:,.2f} GB" if total else f"{done / 1e9:,.2f} GB"
            print(f"{self.what}: {share}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def scratch(home: Path, purpose: Literal["backup", "restore"]) -> Iterator[Path]:
    """Create a private folder in the home and delete it afterwards; first delete those left by killed processes."""
    for old in (*home.glob(".backup-*"), *home.glob(".restore-*")):
        with contextlib.suppress(OSError), _locked(old):
            shutil.rmtree(old)
    folder = Path(tempfile.mkdtemp(prefix=f".{purpose}-", dir=home))
    try:
        with _locked(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def atomic_file(path: Path, *, replace: bool) -> Iterator[IO[bytes]]:
    """Write a file that appears complete under its name or not at all. Raises FileExistsError unless `replace`."""
    for old in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        with contextlib.suppress(OSError), _locked(old):
            old.unlink()
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            with contextlib.suppress(OSError):  # some network file systems have no locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield file
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(part, path)
        else:
            _name(part, path)
        sync(path.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):
            part.unlink()


def _name(part: Path, path: Path) -> None:
    """Give the file its final name, unless another has it by now; some file systems do not support links."""
    try:
        os.link(part, path)
    except FileExistsError:
        raise
    except OSError:
        if path.exists():
            raise FileExistsError(str(path)) from None
        os.replace(part, path)


def sync(folder: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
