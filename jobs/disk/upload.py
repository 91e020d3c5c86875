"""A directory of somebody's own code as it was sent: a tar.gz, looked through before anything is kept or unpacked."""

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
from jobs.disk.rundir import FOLDER, open_root, runs_root
from jobs.errors import Problem, Refused
from jobs.models import Attempt
from training.program import HEAD_BYTES, NotAProgram, interpreter_of
from vigil_core import untrusted

MAX_BYTES = 50 * 1000 * 1000
MAX_UNPACKED = 500 * 1000 * 1000
MAX_MEMBERS = 20_000  # with the folders that only their paths name
MAX_NAME, MAX_PART = 1000, 255  # bytes of a member's path, and of each name in it
UPLOADS = ".uploads"
STAGING = "unpacking-"
DIRTY = "VIGIL.dirty"  # `vigil submit` says so where the files differ from the commit that it names


@dataclass(frozen=True)
class Sent:
    """What an archive holds: the same files, the same digest; and the commit that its sender says they come from."""

    digest: str
    commit: str
    dirty: bool


def problems(code: bytes, *, entries: Mapping[str, str], programs: Set[str] = frozenset()) -> list[Problem]:
    """Return what is wrong with an archive; nothing is written.

    `entries`: the files that it has to have, by their fields. `programs`: the fields whose files are started.
    """
    if len(code) > MAX_BYTES:
        return [
            Problem("code", f"{len(code) / 1e6:.0f} MB are too much: at most 50 MB. Keep data and weights out of it.")
        ]
    heads: dict[str, bytes] = {}
    executable: set[str] = set()
    started = {entries[field] for field in programs & entries.keys()}
    try:
        for archive, member in _walk(code):
            if member.isreg():
                heads[member.name] = _head(archive, member) if member.name in started else b""
                if member.mode & 0o100:
                    executable.add(member.name)
    except _Bad as bad:
        return [Problem("code", str(bad))]
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as error:
        return [
            Problem("code", f"This is not a whole tar.gz ({error}). Pack it with tar -czf code.tar.gz -C DIRECTORY .")
        ]
    found = []
    for field, entry in entries.items():
        if entry not in heads:
            found.append(Problem(field, f"{entry} is not in the upload. Name a file of it, from its top."))
        elif field in programs:
            found += _program_problems(field, entry, heads[entry], is_executable=entry in executable)
    return found


def _head(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    source = archive.extractfile(member)
    return source.read(HEAD_BYTES) if source is not None else b""


def _program_problems(field: str, entry: str, head: bytes, *, is_executable: bool) -> list[Problem]:
    """Return the problem with a file that is to be started, where nothing says what runs it."""
    try:
        interpreter_of(entry, head, is_executable=is_executable)
    except NotAProgram as error:
        return [Problem(field, str(error))]
    return []


def keep(code: bytes) -> str:
    """Lay an archive aside until the run directory is made; answers the name that leads to it, the attempt's key."""
    try:
        (open_root() / UPLOADS).mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        remedy = "Try again later, or ask a sysadmin to look at VIGIL_RUNS."
        raise Refused(f"The upload cannot be kept ({error.strerror}).", remedy) from error
    name = secrets.token_hex(8)
    path = path_of(name)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(code)
        file.flush()
        os.fsync(file.fileno())
    return name


def path_of(name: str) -> Path:
    return runs_root() / UPLOADS / f"{name}.tar.gz"


def forget(name: str) -> None:
    if name:
        path_of(name).unlink(missing_ok=True)


def unpack(name: str, target: Path) -> None:
    """Unpack a kept archive to `target`, which must not exist, whole or not at all.

    It grows where only the portal can reach, and moves once it is shared: where another job of the same Unix user
    could swap a folder for a link meanwhile, we would write, perhaps as root, whatever it liked wherever it liked.
    """
    code = path_of(name).read_bytes()
    with tempfile.TemporaryDirectory(dir=path_of(name).parent, prefix=STAGING) as private:
        staging = Path(private) / "code"
        staging.mkdir()
        os.chown(staging, -1, target.parent.stat().st_gid)
        staging.chmod(FOLDER)  # group and setgid as in the job's folder, for all below
        for archive, member in _walk(code):
            _place(archive, member, staging)
        sharing.share_like(target.parent, staging)
        os.rename(staging, target)


def about(name: str) -> Sent:
    """What tells a kept archive from others."""
    found: dict[str, str] = {}
    said: Mapping[str, str] = {}
    for archive, member in _walk(path_of(name).read_bytes()):
        said = archive.pax_headers
        if member.issym():
            found[member.name] = f"-> {member.linkname}"
        elif (source := archive.extractfile(member)) is not None:
            mode = "x" if member.mode & 0o100 else "-"
            found[member.name] = f"{mode} {hashlib.file_digest(cast(io.BufferedReader, source), 'sha256').hexdigest()}"
    listed = "".join(f"{name}\0{found[name]}\0" for name in sorted(found))
    digest = hashlib.sha256(listed.encode("utf-8", "surrogateescape")).hexdigest()
    commit = said.get("comment", "")
    return Sent(digest, commit, DIRTY in said) if untrusted.COMMIT.fullmatch(commit) else Sent(digest, "", False)


class _Bad(Exception):
    """An archive that we do not take."""


class _Bounded(io.RawIOBase):
    """Inflates no more than what the members seen so far account for: a small archive cannot become a huge header."""

    def __init__(self, code: bytes) -> None:
        self._file = gzip.GzipFile(fileobj=io.BytesIO(code))
        self.allowance = 8 << 20

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self.allowance -= len(data)
        if self.allowance < 0:
            raise _Bad("It inflates to much more than its files. Pack it anew with tar -czf.")
        return data


def _walk(code: bytes) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """The members in order, names cleaned; _Bad at the first that is not a plain file, folder or link within."""
    total, seen = 0, {PurePosixPath("."): True}
    source = _Bounded(code)
    with tarfile.open(fileobj=source, mode="r|") as archive:
        for count, member in enumerate(archive):
            if member.size < 0:  # else a folder of -1 GB makes room for as much
                raise _Bad(f"{member.name[:80]!r} is of {member.size:,} bytes. Pack the directory anew.")
            total += member.size
            source.allowance += member.size + 65_536
            if count >= MAX_MEMBERS or len(seen) > MAX_MEMBERS:
                raise _Bad(f"More than {MAX_MEMBERS:,} files. Pack what the program needs.")
            if total > MAX_UNPACKED:
                raise _Bad("More than 500 MB unpacked. Keep data and weights out of it.")
            path = _clean(member.name)
            if path == PurePosixPath("."):
                continue
            if not (member.isreg() or member.isdir() or member.issym()):
                raise _Bad(f"{path} is not a file, a folder or a link. Take it out.")
            _note_folders(path, seen)
            if path in seen and not (seen[path] and member.isdir()):
                raise _Bad(f"{path} is packed twice. Pack the directory anew.")
            if member.issym():
                _check_link(path, member.linkname)
            seen[path] = member.isdir()
            member.name = str(path)
            yield archive, member


def _clean(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise _Bad(f"{name[:80]!r} leads out of the upload. Pack relative names.")
    if _is_too_long(path):
        raise _Bad(f"{name[:80]!r} is too long a name. Call it something shorter.")
    return path


def _is_too_long(path: PurePosixPath) -> bool:
    """Whether file systems have no room for it: each part's and a whole path's bytes are bounded."""
    name = os.fsencode(path)
    return len(name) > MAX_NAME or max(map(len, name.split(b"/"))) > MAX_PART


def _note_folders(path: PurePosixPath, seen: dict[PurePosixPath, bool]) -> None:
    """The folders on the way to a member, which need no member of their own; those above a known one are known."""
    for parent in path.parents:
        if parent in seen:
            if not seen[parent]:
                raise _Bad(f"{path} lies behind a link or a file. Pack the folder itself.")
            return
        seen[parent] = True


def _check_link(path: PurePosixPath, target: str) -> None:
    """Upward steps first, no more than the link lies deep, then names: such a target cannot lead out."""
    parts = PurePosixPath(target).parts
    if "\0" in target or _is_too_long(PurePosixPath(target)):
        raise _Bad(f"{path} is a link to what no file can be called. Pack the file itself.")
    up = next((i for i, part in enumerate(parts) if part != ".."), len(parts))
    if target.startswith("/") or ".." in parts[up:] or up > len(path.parent.parts) or not parts:
        raise _Bad(f"{path} is a link that leads out of the upload. Pack the file itself.")


def _place(archive: tarfile.TarFile, member: tarfile.TarInfo, root: Path) -> None:
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


def awaited() -> set[str]:
    """Names of uploads that are still to be unpacked: some jobs wait for days, be it in a later attempt.

    And names of the jobs that brought none: which did, only their specifications tell.
    """
    waiting = Attempt.objects.filter(ended_at=None, scheduler_id="").values("job")
    rows = Attempt.objects.filter(number=1, job__in=waiting).values_list("key", "job__sweep__key")
    return {sweep_key or key for key, sweep_key in rows}


def forget_stale(older_than_s: float = 86_400, *, awaited: Set[str] = frozenset()) -> None:
    """Remove uploads that no worker fetched within a day: their submission failed between the file and the row.

    And what a worker that was killed had half unpacked. `awaited`: names of those that are not stale (awaited).
    """
    folder = runs_root() / UPLOADS
    for path in (*folder.glob("*.tar.gz"), *folder.glob(f"{STAGING}*")):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime <= older_than_s or path.name.removesuffix(".tar.gz") in awaited:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
