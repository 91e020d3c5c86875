"""Describe a committed checkpoint by its folder alone: no torch, and no trust in what is there.

    checkpoints/step-400/COMMITTED       JSON: every file with size and digest, what the state is, where it came from
    checkpoints/step-400/VERIFIED        its trainer has read it back and found every digest right
    checkpoints/step-400/DAMAGED         it was found not to be what was written, and no longer counts
    checkpoints/.step-500.3/             being written by generation 3; not a checkpoint yet

A checkpoint is *committed* when its manifest is there and the sizes are right, *verified* when the digests are as well.
The trainer, `python -m training verify` and the portal share these functions.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

COMMITTED, VERIFIED, DAMAGED = "COMMITTED", "VERIFIED", "DAMAGED"
VERSION = 1
MANIFEST_BYTES = 64 * 2**20
"""The largest manifest that is read: several 100,000 files."""
CHUNK_BYTES = 4 * 2**20
RETRY_SECONDS = 0.1
NAME = re.compile(r"step-(?P<step>\d{1,18})(\.g(?P<generation>\d{1,9}))?")
STAGING = re.compile(r"\.step-\d{1,18}\.(?P<generation>\d{1,9})")
FILE_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,255}")
_PERMANENT_ERRORS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO, errno.EISDIR})
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class CheckpointError(Exception):
    """The folder contains no checkpoint that could be resumed; the message says why."""


class UnreadableManifest(CheckpointError):
    """The folder could not be read just now, for reasons that may be temporary, so its state is unknown."""


class TooLarge(CheckpointError):
    """There is more to read than was allowed; the checkpoint may be intact."""


@dataclass(frozen=True)
class CheckpointFile:
    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One committed checkpoint. `name` is its folder's, which may change; (step, generation) never does."""

    name: str = ""
    step: int
    generation: int
    parent: tuple[int, int] | None = None
    """(step, generation) of the checkpoint that its run had resumed from or committed before; None: from scratch."""
    ancestors: tuple[tuple[int, int], ...] = ()
    """(step, generation) of earlier checkpoints on its branch that still existed, its parent last."""
    consumed_samples: int
    world_size: int
    layout: dict[str, Any]
    """How the ranks shared the work: parallelism, axes, micro_batch, device."""
    config_hash: str
    config: dict[str, Any] = field(default_factory=dict)
    """The hashed settings, so that a difference can be named."""
    data: str = ""
    """Identity of the data it was trained on."""
    state: dict[str, Any] = field(default_factory=dict)
    """Small values that the trainer continues from, such as the best validation loss."""
    files: tuple[CheckpointFile, ...]
    created: float
    """Unix time of the commit."""
    seconds: float = 0.0
    """Seconds on rank 0 from the beginning of the copy, which stalls training, to the commit."""
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def identity(self) -> tuple[int, int]:
        return self.step, self.generation

    def share(self, rank: int, size: int) -> tuple[CheckpointFile, ...]:
        """Return this rank's part of the files, if `size` ranks process a part each."""
        return self.files[rank::size]

    def dump(self) -> str:
        data = asdict(self)
        del data["name"]
        return json.dumps({"version": VERSION, **data}, indent=1)


CheckpointLocation = Path | int
"""A checkpoint's folder: its path, or a descriptor that a careful caller has opened."""


def read(checkpoint: CheckpointLocation) -> Manifest:
    """Return the manifest. Raises CheckpointError if there is none or it is invalid."""
    with _open_folder(checkpoint) as folder:
        return _read(folder, _name(checkpoint))


def check(checkpoint: CheckpointLocation) -> Manifest:
    """Return the manifest of a *committed* checkpoint: every file has its size, and it is not marked as damaged.

    Raises CheckpointError otherwise.
    """
    with _open_folder(checkpoint) as folder:
        if _has(folder, DAMAGED):
            raise CheckpointError("it was found damaged: see the file DAMAGED in it")
        manifest = _read(folder, _name(checkpoint))
        for file in manifest.files:
            os.close(_open_file(folder, file))
        return manifest


def damage_reason(checkpoint: Path) -> str:
    """Return why a checkpoint was marked as damaged, without a full stop; "" if it was not."""
    try:
        with open(os.open(checkpoint / DAMAGED, _FILE), encoding="utf-8", errors="replace") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return f"{DAMAGED} is not a regular file"
            return file.read(2000).strip().rstrip(".") or "no reason was given"
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{DAMAGED} can't be read: {error.strerror}"


def verify(
    checkpoint: CheckpointLocation,
    *,
    files: Iterable[CheckpointFile] | None = None,
    max_bytes: int | None = None,
    between: Callable[[], None] = lambda: None,
) -> Manifest:
    """Return the manifest of a *verified* checkpoint: all files, or these, have their digests. Raises CheckpointError.

    Reads at most `max_bytes`, else raises TooLarge. `between` is called before every CHUNK_BYTES; it may raise to
    abort.
    """
    with _open_folder(checkpoint) as folder:
        manifest = _read(folder, _name(checkpoint))
        if max_bytes is not None and manifest.bytes > max_bytes:
            raise TooLarge(f"{manifest.bytes} bytes are more than the {max_bytes} that are read")
        for file in manifest.files if files is None else files:
            if _digest(_open_file(folder, file), file, between) != file.sha256:
                raise CheckpointError(f"{file.file} is not what was written: its sha256 differs from the manifest's")
        return manifest


def committed(checkpoints: Path, *, patience: float = 0.0) -> list[Manifest]:
    """Return every committed checkpoint under this folder by step and generation; broken ones are left out.

    Those that cannot be read just now are retried for `patience` seconds in total, and then also left out.
    """
    until = time.monotonic() + patience
    found = []
    for name in _names_in(checkpoints):
        if NAME.fullmatch(name):
            with suppress(CheckpointError):
                found.append(_check_until(until, checkpoints / name))
    return sorted(found, key=lambda manifest: manifest.identity)


def newest_save_seconds(checkpoints: Path) -> float:
    """Return how many seconds the newest committed checkpoint took to write; 0 without one."""
    newest = max(committed(checkpoints), key=lambda manifest: (manifest.generation, manifest.step), default=None)
    return float(newest.seconds or 0.0) if newest else 0.0


def _check_until(until: float, checkpoint: Path) -> Manifest:
    while True:
        try:
            return check(checkpoint)
        except UnreadableManifest:
            if time.monotonic() >= until:
                raise
        time.sleep(RETRY_SECONDS)


def broken(checkpoints: Path) -> Iterator[tuple[str, Manifest | None, CheckpointError]]:
    """Yield name, manifest if there is one, and error of folders named like a checkpoint that do not count.

    Those that are marked as damaged are left out: they have been reported.
    """
    for name in sorted(_names_in(checkpoints)):
        if not NAME.fullmatch(name) or (checkpoints / name / DAMAGED).exists():
            continue
        try:
            check(checkpoints / name)
        except CheckpointError as error:
            manifest = None
            with suppress(CheckpointError):
                manifest = read(checkpoints / name)
            yield name, manifest, error


def staged(checkpoints: Path) -> Iterator[tuple[Path, int]]:
    """Yield (folder, generation) of checkpoints that were being written."""
    for name in _names_in(checkpoints):
        if match := STAGING.fullmatch(name):
            yield checkpoints / name, int(match["generation"])


def _names_in(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _name(checkpoint: CheckpointLocation) -> str:
    return checkpoint.name if isinstance(checkpoint, Path) else ""


@contextmanager
def _open_folder(checkpoint: CheckpointLocation) -> Iterator[int]:
    if isinstance(checkpoint, int):
        yield checkpoint
        return
    try:
        folder = os.open(checkpoint, _FOLDER)
    except OSError as error:
        raise _error_for(str(checkpoint), error) from error
    try:
        yield folder
    finally:
        os.close(folder)


def _error_for(name: str, error: OSError) -> CheckpointError:
    """Convert an OSError to CheckpointError if it is permanent, else to UnreadableManifest.

    Absent or of the wrong kind is permanent; anything else may be temporary (EIO, ESTALE, EMFILE).
    """
    kind = CheckpointError if error.errno in _PERMANENT_ERRORS else UnreadableManifest
    return kind(f"{name} can't be read: {error.strerror}")


def _has(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _error_for(name, error) from error
    return True


def _read(folder: int, name: str) -> Manifest:
    try:
        descriptor = os.open(COMMITTED, _FILE, dir_fd=folder)
    except FileNotFoundError as error:
        raise CheckpointError("there is no COMMITTED manifest: it was never finished, or is not Vigil's") from error
    except OSError as error:
        raise _error_for(COMMITTED, error) from error
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > MANIFEST_BYTES:
            raise CheckpointError("COMMITTED is not a manifest: not a plain file, or far too large")
        try:
            return _parse(json.loads(file.read(MANIFEST_BYTES)), name)
        except OSError as error:
            raise _error_for(COMMITTED, error) from error
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise CheckpointError(f"COMMITTED is damaged: {type(error).__name__}: {error}") from error


def _parse(data: Mapping[str, Any], name: str) -> Manifest:
    if data["version"] != VERSION:
        raise CheckpointError(f"the manifest has version {data['version']}, this Vigil reads {VERSION}")
    files = tuple(_parse_file(item) for item in data["files"])
    if len({file.file for file in files}) != len(files):
        raise ValueError("a file is listed twice")
    return Manifest(
        name=name,
        step=_count(data["step"]),
        generation=_count(data["generation"]),
        parent=_identity(data["parent"]) if data["parent"] is not None else None,
        ancestors=tuple(_identity(item) for item in data["ancestors"]),
        consumed_samples=_count(data["consumed_samples"]),
        world_size=_count(data["world_size"]),
        layout=dict(data["layout"]),
        config_hash=str(data["config_hash"]),
        config=dict(data["config"]),
        data=str(data["data"]),
        state=dict(data["state"]),
        files=files,
        created=float(data["created"]),
        seconds=float(data["seconds"]),
        versions=dict(data["versions"]),
    )


def _parse_file(item: Mapping[str, Any]) -> CheckpointFile:
    file = CheckpointFile(str(item["file"]), _count(item["bytes"]), str(item["sha256"]))
    if not FILE_NAME.fullmatch(file.file) or not re.fullmatch(r"[0-9a-f]{64}", file.sha256):
        raise ValueError(f"{file.file[:80]!r} is not a file of a checkpoint")
    return file


def _identity(item: Any) -> tuple[int, int]:
    step, generation = item
    return _count(step), _count(generation)


def _count(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _open_file(folder: int, file: CheckpointFile) -> int:
    """Return a descriptor of a regular file of the size in the manifest, inside this very folder."""
    try:
        descriptor = os.open(file.file, _FILE, dir_fd=folder)
    except OSError as error:
        raise _error_for(file.file, error) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or status.st_size != file.bytes:
        os.close(descriptor)
        raise CheckpointError(f"{file.file} has {status.st_size} bytes, the manifest says {file.bytes}")
    return descriptor


def _digest(descriptor: int, entry: CheckpointFile, between: Callable[[], None]) -> str:
    """Return the SHA-256 digest of a file, of at most as many bytes as the manifest says.

    A file that grows meanwhile is not read forever.
    """
    digest, size = hashlib.sha256(), entry.bytes
    with open(descriptor, "rb", buffering=0) as file:
        while size > 0:
            between()
            try:
                chunk = file.read(min(size, CHUNK_BYTES))
            except OSError as error:
                raise _error_for(entry.file, error) from error
            if not chunk:
                break
            digest.update(chunk)
            size -= len(chunk)
    return digest.hexdigest()
