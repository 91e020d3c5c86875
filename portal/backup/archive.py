"""Read and write a backup's archive: a gzipped tar of plain files, manifest first. Reading treats it as untrusted."""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import msgspec

from portal.run.preflight import StartRefused

FORMAT = 1
MANIFEST = "manifest.json"
SECRET_KEY = "secret_key"
DATABASES = {"sqlite": "database.sqlite3", "postgresql": "database.pgdump"}
MANIFEST_LIMIT = 1 << 20
PIECE = 1 << 20
_BLOCK = 512
_RECORD = 20 * _BLOCK  # tar pads its end to whole records

Kind = Literal["sqlite", "postgresql"]
Version = Annotated[str, msgspec.Meta(pattern=r"\A[0-9A-Za-z.+-]{1,64}\Z")]
Moment = Annotated[datetime, msgspec.Meta(tz=True)]
Progress = Callable[[int, int], None]  # (bytes done, bytes in total)


class ArchiveMember(msgspec.Struct, frozen=True):
    name: str
    bytes: int
    sha256: str


class BackupManifest(msgspec.Struct, frozen=True):
    """The contents of a backup. `migrations` are those applied in its database, by app; `runs` is not included."""

    format: int
    vigil: Version
    made_at: Moment
    database: Kind
    database_version: str
    dump_version: int  # pg_dump's major version; 0 for SQLite
    migrations: dict[str, list[str]]
    runs: str
    members: list[ArchiveMember]

    @property
    def bytes(self) -> int:
        return sum(member.bytes for member in self.members)


def describe(path: Path, progress: Progress) -> ArchiveMember:
    """Return the manifest's entry for a file: its name, size and digest."""
    size, done, digest = path.stat().st_size, 0, hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            digest.update(piece)
            done += len(piece)
            progress(done, size)
    return ArchiveMember(path.name, done, digest.hexdigest())


def write(file: IO[bytes], manifest: BackupManifest, folder: Path, progress: Progress) -> None:
    """Write the manifest and its members, which lie in `folder`, to an open file."""
    text = msgspec.json.format(msgspec.json.encode(manifest)) + b"\n"
    done = 0
    # Level 1 compresses a database to a third in a quarter of the time that level 9 takes for little more.
    with gzip.GzipFile("", "wb", compresslevel=1, fileobj=file) as stream:
        stream.write(_header(MANIFEST, len(text), manifest.made_at))
        stream.write(text + _padding(len(text)))
        for member in manifest.members:
            stream.write(_header(member.name, member.bytes, manifest.made_at))
            left = member.bytes
            with (folder / member.name).open("rb") as source:
                while left and (piece := source.read(min(PIECE, left))):
                    stream.write(piece)
                    left -= len(piece)
                    done += len(piece)
                    progress(done, manifest.bytes)
            if left:
                raise OSError(f"{member.name} shrank while it was read")
            stream.write(_padding(member.bytes))
        stream.write(bytes(_RECORD))


def _header(name: str, size: int, made_at: datetime) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o600, int(made_at.timestamp())
    return info.tobuf(tarfile.GNU_FORMAT)  # the one format that stores sizes above 8 GiB without an extra header


def _padding(size: int) -> bytes:
    return bytes(-size % _BLOCK)


@contextmanager
def open_archive(path: Path) -> Iterator[ArchiveReader]:
    """Open an archive and read its manifest; any defect, now or later, raises StartRefused with a sentence."""
    try:
        with path.open("rb") as raw, gzip.GzipFile(fileobj=raw) as stream:
            yield ArchiveReader(path, stream)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise StartRefused(f"{path} is damaged or truncated: use another backup, or copy this one again.") from None
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise StartRefused(
            f"{path} cannot be read ({error.strerror}): name a file that `vigil backup` wrote."
        ) from None


class ArchiveReader:
    """Read only what `write` writes: these names, each once, in the manifest's order; plain files; the stated sizes.

    Headers are read block by block instead of by tarfile, which would follow links and trust extended headers.
    """

    def __init__(self, path: Path, stream: gzip.GzipFile) -> None:
        self.path, self.stream = path, stream
        name, size = self._next()
        if name != MANIFEST or size > MANIFEST_LIMIT:
            raise self._foreign("it does not begin with a manifest")
        text = self._exactly(size)
        self._exactly(-size % _BLOCK)
        self.manifest = self._parse(text)

    def _parse(self, text: bytes) -> BackupManifest:
        try:
            document: Any = msgspec.json.decode(text)
            if isinstance(document, dict) and isinstance(document.get("format"), int) and document["format"] > FORMAT:
                raise StartRefused(
                    f"{self.path} was made by a newer Vigil ({document.get('vigil')}): upgrade this one first."
                )
            manifest = msgspec.convert(document, BackupManifest)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise self._foreign(f"its manifest is invalid ({error})") from None
        names = [member.name for member in manifest.members]
        if names != [SECRET_KEY, DATABASES[manifest.database]] or any(m.bytes < 0 for m in manifest.members):
            raise self._foreign(f"it lists {', '.join(map(ascii, names))[:200] or 'nothing'}")
        return manifest

    def unpack(self, folder: Path, progress: Progress) -> None:
        """Extract the members into an empty folder and compare every digest; nothing else is touched."""
        done = 0
        for member in self.manifest.members:
            name, size = self._next()
            if (name, size) != (member.name, member.bytes):
                raise self._foreign(f"{ascii(name)[:200]} of {size:,} bytes does not match its manifest")
            digest = hashlib.sha256()
            target = os.open(folder / member.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with open(target, "wb") as file:
                left = size
                while left:
                    piece = self._exactly(min(left, PIECE))
                    file.write(piece)
                    digest.update(piece)
                    left -= len(piece)
                    done += len(piece)
                    progress(done, self.manifest.bytes)
                file.flush()
                os.fsync(file.fileno())
            if digest.hexdigest() != member.sha256:
                raise StartRefused(f"{self.path} is damaged ({name} has another digest): use another backup.")
            self._exactly(-size % _BLOCK)
        if not _is_key(folder / SECRET_KEY):
            raise self._foreign("its key is invalid")
        # Read to the very end: only there does gzip check its checksum.
        rest = self.stream.read(2 * _RECORD)
        if rest.strip(b"\0") or len(rest) >= 2 * _RECORD:
            raise self._foreign("it contains more than its manifest lists")
        if len(rest) < 2 * _BLOCK:
            raise EOFError

    def _next(self) -> tuple[str, int]:
        """Return the name and size of the next member, which must be a plain file."""
        block = self._exactly(_BLOCK)
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "strict")
        except (tarfile.HeaderError, UnicodeDecodeError):
            raise self._foreign("it is not a tar") from None
        if info.type != tarfile.REGTYPE or info.size < 0:
            raise self._foreign(f"{ascii(info.name)[:200]} is not a plain file")
        return info.name, info.size

    def _exactly(self, size: int) -> bytes:
        data = self.stream.read(size)
        if len(data) != size:
            raise EOFError
        return data

    def _foreign(self, why: str) -> StartRefused:
        return StartRefused(f"{self.path} is not a Vigil backup ({why}): name a file that `vigil backup` wrote.")


def _is_key(path: Path) -> bool:
    """Return whether a portal could start with this key."""
    try:
        return path.stat().st_size <= PIECE and bool(path.read_text("utf-8").strip())
    except UnicodeDecodeError:
        return False


def require_space(size: int, folder: Path) -> None:
    """Refuse an archive that would fill the disk."""
    free = shutil.disk_usage(folder).free
    if size > free:
        raise StartRefused(
            f"{folder} has {free / 1e9:,.1f} GB free and {size / 1e9:,.1f} GB are needed: free some space there."
        )
