"""Check and unpack an uploaded directory of code: a tar.gz, validated before anything is stored or unpacked."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import secrets
import shutil
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import cast

from jobs.disk import sharing
from jobs.disk.rundir import FOLDER_MODE, open_root, runs_root
from jobs.errors import Problem, Refused
from jobs.models import Attempt
from training.interpreter import HEAD_BYTES, NotAProgram, interpreter_of
from vigil_core import untrusted

MAX_BYTES = 50 * 1000 * 1000
MAX_UNPACKED = 500 * 1000 * 1000
MAX_MEMBERS = 20_000  # with the folders that only their paths name
MAX_NAME, MAX_PART = 1000, 255  # bytes of a member's path, and of each name in it
UPLOADS = ".uploads"
STAGING = "unpacking-"
DIRTY = "VIGIL.dirty"  # `vigil submit` adds it if the files differ from the commit that it names


@dataclass(frozen=True)
class UploadedCode:
    """The digest of an archive's files, and the commit that its sender states."""

    digest: str
    commit: str
    dirty: bool


def problems(code: bytes, *, entries: Mapping[str, str], programs: Set[str] = frozenset()) -> list[Problem]:
    """Return what is wrong with an archive; nothing is written.

    `entries`: the files that it must contain, by field. `programs`: the fields whose files are started.
    """
    if len(code) > MAX_BYTES:
        return [Problem("code", f"{len(code) / 1e6:.0f} MB is too much: 50 MB at most. Leave out data and weights.")]
    heads: dict[str, bytes] = {}
    executable: set[str] = set()
    started = {entries[field] for field in programs & entries.keys()}
    try:
        for archive, member in _walk(code):
            if member.isreg():
                heads[member.name] = _head(archive, member) if member.name in started else b""
                if member.mode & 0o100:
                    executable.add(member.name)
    except _BadArchive as bad:
        return [Problem("code", str(bad))]
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as error:
        return [
            Problem(
                "code", f"This is not a complete tar.gz ({error}). Pack it with tar -czf code.tar.gz -C DIRECTORY ."
            )
        ]
    missing = []
    for field, entry in entries.items():
        if entry not in heads:
            missing.append(Problem(field, f"{entry} is not in the upload. Name a file of it, from its top."))
        elif field in programs:
            missing += _program_problems(field, entry, heads[entry], is_executable=entry in executable)
    return missing


def _head(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    source = archive.extractfile(member)
    return source.read(HEAD_BYTES) if source is not None else b""


def _program_problems(field: str, entry: str, head: bytes, *, is_executable: bool) -> list[Problem]:
    """Return the problem with a file that is to be started, if it is unclear what runs it."""
    try:
        interpreter_of(entry, head, is_executable=is_executable)
    except NotAProgram as error:
        return [Problem(field, str(error))]
    return []


def store(code: bytes) -> str:
    """Store an archive until the run directory is made. Return the name that leads to it, the attempt's key."""
    try:
        (open_root() / UPLOADS).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        remedy = "Try again later, or ask a sysadmin to check VIGIL_RUNS."
        raise Refused(f"The upload cannot be stored ({error.strerror}).", remedy) from error
    name = secrets.token_hex(8)
    path = path_of(name)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(code)
        file.flush()
        os.fsync(file.fileno())
    return name


def path_of(name: str) -> Path:
    return runs_root() / UPLOADS / f"{name}.tar.gz"


def delete(name: str) -> None:
    if name:
        path_of(name).unlink(missing_ok=True)


def unpack(name: str, target: Path) -> None:
    """Unpack a stored archive to `target`, which must not exist, completely or not at all.

    It is unpacked where only the portal has access, and moved once it is shared: where another job of the same Unix
    user could swap a folder for a link meanwhile, the portal would write, perhaps as root, wherever that job liked.
    """
    code = path_of(name).read_bytes()
    with tempfile.TemporaryDirectory(dir=path_of(name).parent, prefix=STAGING) as private:
        staging = Path(private) / "code"
        staging.mkdir()
        os.chown(staging, -1, target.parent.stat().st_gid)
        staging.chmod(FOLDER_MODE)  # group and setgid as in the job's folder, for all below
        for archive, member in _walk(code):
            _extract(archive, member, staging)
        sharing.share_like(target.parent, staging)
        os.rename(staging, target)


def describe(name: str) -> UploadedCode:
    """Return the digest of a stored archive's files, and the commit that it names."""
    described: dict[str, str] = {}
    headers: Mapping[str, str] = {}
    for archive, member in _walk(path_of(name).read_bytes()):
        headers = archive.pax_headers
        if member.issym():
            described[member.name] = f"-> {member.linkname}"
        elif (source := archive.extractfile(member)) is not None:
            mode = "x" if member.mode & 0o100 else "-"
            digest = hashlib.file_digest(cast(io.BufferedReader, source), "sha256").hexdigest()
            described[member.name] = f"{mode} {digest}"
    listed = "".join(f"{name}\0{described[name]}\0" for name in sorted(described))
    digest = hashlib.sha256(listed.encode("utf-8", "surrogateescape")).hexdigest()
    commit = headers.get("comment", "")
    return (
        UploadedCode(digest, commit, DIRTY in headers)
        if untrusted.COMMIT.fullmatch(commit)
        else UploadedCode(digest, "", False)
    )


class _BadArchive(Exception):
    """An archive that is refused."""


class _BoundedGzip(io.RawIOBase):
    """Inflate no more than the members read so far account for: a small archive cannot become a huge header."""

    def __init__(self, code: bytes) -> None:
        self._file = gzip.GzipFile(fileobj=io.BytesIO(code))
        self.allowance = 8 << 20

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.allowance -= len(data)
        if self.allowance < 0:
            raise _BadArchive("It inflates to much more than its files. Pack it again with tar -czf.")
        return data


def _walk(code: bytes) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield the members in order, with clean names.

    Raise _BadArchive at the first that is not a plain file, folder or link.
    """
    total, members = 0, {PurePosixPath("."): True}
    source = _BoundedGzip(code)
    with tarfile.open(fileobj=source, mode="r|") as archive:
        for count, member in enumerate(archive):
            if member.size < 0:  # else a folder of -1 GB makes room for as much
                raise _BadArchive(f"{member.name[:80]!r} has {member.size:,} bytes. Pack the directory again.")
            total += member.size
            source.allowance += member.size + 65_536
            if count >= MAX_MEMBERS or len(members) > MAX_MEMBERS:
                raise _BadArchive(f"More than {MAX_MEMBERS:,} files. Pack only what the program needs.")
            if total > MAX_UNPACKED:
                raise _BadArchive("More than 500 MB unpacked. Leave out data and weights.")
            path = _clean(member.name)
            if path == PurePosixPath("."):
                continue
            if not (member.isreg() or member.isdir() or member.issym()):
                raise _BadArchive(f"{path} is not a file, a folder or a link. Remove it.")
            _note_folders(path, members)
            if path in members and not (members[path] and member.isdir()):
                raise _BadArchive(f"{path} is packed twice. Pack the directory again.")
            if member.issym():
                _check_link(path, member.linkname)
            members[path] = member.isdir()
            member.name = str(path)
            yield archive, member


def _clean(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise _BadArchive(f"{name[:80]!r} leads out of the upload. Pack relative names.")
    if _is_too_long(path):
        raise _BadArchive(f"{name[:80]!r} is too long a name. Shorten it.")
    return path


def _is_too_long(path: PurePosixPath) -> bool:
    """Return whether file systems cannot store it: a path and each name in it have a limit in bytes."""
    name = os.fsencode(path)
    return len(name) > MAX_NAME or max(map(len, name.split(b"/"))) > MAX_PART


def _note_folders(path: PurePosixPath, members: dict[PurePosixPath, bool]) -> None:
    """Note the folders on the way to a member, which need no member of their own."""
    for parent in path.parents:
        if parent in members:
            if not members[parent]:
                raise _BadArchive(f"{path} lies behind a link or a file. Pack the folder itself.")
            return
        members[parent] = True


def _check_link(path: PurePosixPath, target: str) -> None:
    """Refuse a link that leads out: steps up come first, no more than its depth, then names."""
    parts = PurePosixPath(target).parts
    if "\0" in target or _is_too_long(PurePosixPath(target)):
        raise _BadArchive(f"{path} is a link to an invalid name. Pack the file itself.")
    up = next((i for i, part in enumerate(parts) if part != ".."), len(parts))
    if target.startswith("/") or ".." in parts[up:] or up > len(path.parent.parts) or not parts:
        raise _BadArchive(f"{path} is a link that leads out of the upload. Pack the file itself.")


def _extract(archive: tarfile.TarFile, member: tarfile.TarInfo, root: Path) -> None:
    path = root / member.name
    path.parent.mkdir(mode=0o2750, parents=True, exist_ok=True)
    if member.isdir():
        path.mkdir(mode=0o2750, exist_ok=True)
    elif member.issym():
        path.symlink_to(member.linkname)
    else:
        source = archive.extractfile(member)
        assert source is not None
        mode = 0o750 if member.mode & 0o100 else 0o640
        path.unlink(missing_ok=True)
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode), "wb") as file:
            while piece := source.read(1 << 20):
                file.write(piece)


def pending_uploads() -> set[str]:
    """Return the names of uploads that jobs in the queue may still unpack; some wait for days, or for a later attempt.

    Includes jobs without uploads: only their specifications show which have one.
    """
    waiting = Attempt.objects.filter(ended_at=None, scheduler_id="").values("job")
    rows = Attempt.objects.filter(number=1, job__in=waiting).values_list("key", "job__sweep__key")
    return {sweep_key or key for key, sweep_key in rows}


def delete_stale(older_than_s: float = 86_400, *, pending: Set[str] = frozenset()) -> None:
    """Delete uploads that no worker fetched within a day: their submission failed between the file and the row.

    Also deletes what a killed worker had half unpacked. `pending`: names to keep (see pending_uploads).
    """
    folder = runs_root() / UPLOADS
    for path in (*folder.glob("*.tar.gz"), *folder.glob(f"{STAGING}*")):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime <= older_than_s or path.name.removesuffix(".tar.gz") in pending:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
