"""Where texts come from: files of a folder, JSON lines, Python's standard library; read as a stream of documents.

Everything is read inside the allocation as the job's user. A file larger than memory is no matter: texts are taken in
blocks, JSON line by line.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import stat
import sys
import sysconfig
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from training.corpus.errors import DataError
from training.corpus.tokenizer import plain
from training.runtime import data_roots

STDLIB = "stdlib"
LEFT_OUT = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)
"""Folders of the standard library that are not it, or hardly text."""
BLOCK_BYTES = 16 * 2**20
"""A text longer than this is taken as several, cut at line ends."""
LINE_BYTES = 256 * 2**20
TELL_FILES = 1000
JSONL = (".jsonl", ".ndjson")
GZ = ".gz"


@dataclass(frozen=True, slots=True)
class File:
    path: str
    name: str
    """Its path below the source's folder."""
    size: int
    """Its size in bytes."""
    changed_ns: int

    @property
    def owner(self) -> str:
        """What lies straight in the source: a folder that it is in, or it itself, without its ending."""
        first, _, below = self.name.partition(os.sep)
        whose = first if below else _unpacked(first).rpartition(".")[0] or first
        return whose.encode("utf-8", "replace").decode()


@dataclass(frozen=True)
class Source:
    """Files whose texts make up the data, in the order in which they are read."""

    label: str
    files: list[File] = field(repr=False)
    text_field: str = "text"
    strict: bool = True
    """Texts that are not UTF-8 are refused; else what can't be read is replaced."""

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def fingerprint(self) -> str:
        """Changes when a file was added, removed or written to; nothing is read for it."""
        digest = hashlib.sha256(f"{self.text_field} {self.strict}\n".encode())
        for file in self.files:
            # The standard library is the same wherever it was installed, and whenever.
            changed = file.changed_ns if self.strict else 0
            digest.update(f"{file.name}\0{file.size}\0{changed}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def documents(self) -> Iterator[tuple[str, int, str]]:
        """(text, bytes of the source read so far, whose it is)."""
        before = 0
        for file in self.files:
            with _opened(file) as (content, read):
                is_json = _unpacked(file.name).lower().endswith(JSONL)
                texts = _json_texts(file, content, self.text_field) if is_json else self._texts(file, content)
                try:
                    for text in texts:
                        yield text, before + min(read(), file.size), file.owner
                except (EOFError, zlib.error, gzip.BadGzipFile):
                    raise DataError(f"{file.path} is a damaged or unfinished .gz. Copy it anew.", "source") from None
                except OSError as error:
                    raise _unreadable(file.path, error) from None
            before += file.size

    def _texts(self, file: File, content: IO[bytes]) -> Iterator[str]:
        at = 0
        for block in _blocks(content):
            try:
                text = block.decode("utf-8-sig" if not at else "utf-8", "strict" if self.strict else "replace")
            except UnicodeDecodeError as error:
                message = (
                    f"{file.path} is not UTF-8 (byte 0x{error.object[error.start]:02X} at {at + error.start:,}). "
                    "Convert it (iconv -f latin1 -t utf-8), or leave it out by its ending (suffixes)."
                )
                raise DataError(message, "source") from None
            at += len(block)
            yield text


def library_folder() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def standard_library() -> Source:
    root = library_folder()
    files = list(_walk(root, (".py",), left_out=LEFT_OUT))
    return Source(f"stdlib-{sys.version_info.major}.{sys.version_info.minor}", files, strict=False)


def find(path: Path, *, suffixes: tuple[str, ...], text_field: str, tell: Callable[[], None] = lambda: None) -> Source:
    """The texts and JSON lines at a path: a file, or all in a folder and below; DataError if there are none."""
    try:
        kind = data_roots.stat(path).st_mode
    except OSError as error:
        raise _unreadable(path, error) from None
    label = plain(_unpacked(path.name))
    if stat.S_ISDIR(kind):
        files = list(_walk(path, (*suffixes, *JSONL), tell=tell))
    elif stat.S_ISREG(kind):
        files = [_file(path, path.name)]
        label = plain(_unpacked(path.name).rpartition(".")[0] or path.name)
    else:
        raise DataError(f"{path} is neither a file nor a folder. Name one that holds texts.", "source")
    if not any(file.size for file in files):
        endings = ", ".join((*suffixes, *JSONL))
        what = "is empty" if stat.S_ISREG(kind) else f"holds no text: no file in it, or below, ends in {endings}"
        raise DataError(f"{path} {what}. Name another folder, or the endings of your files (suffixes).", "source")
    return Source(label, files, text_field)


def _walk(
    root: Path,
    suffixes: tuple[str, ...],
    *,
    left_out: frozenset[str] = frozenset(),
    tell: Callable[[], None] = lambda: None,
) -> Iterator[File]:
    """Every regular file with such an ending, in the same order on every machine; names that begin with a dot aside.

    Links are followed, and a folder that several of them lead to, or one within it, is read once.
    """

    def refuse(error: OSError) -> None:
        raise _unreadable(error.filename, error)

    endings = tuple(ending for suffix in suffixes for ending in (suffix.lower(), suffix.lower() + GZ))
    seen: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=True):
        try:
            data_roots.check_folder(folder)
        except data_roots.OutsideRoots as error:
            refuse(error)
        about = os.stat(folder)
        if (about.st_dev, about.st_ino) in seen:
            folders.clear()
            continue
        seen.add((about.st_dev, about.st_ino))
        folders[:] = sorted(name for name in folders if name not in left_out and not name.startswith("."))
        for number, name in enumerate(sorted(names)):
            if number % TELL_FILES == 0:
                tell()
            if name.lower().endswith(endings) and not name.startswith("."):
                path = os.path.join(folder, name)
                if data_roots.is_file(path):
                    yield _file(path, os.path.relpath(path, root))


def _unpacked(name: str) -> str:
    """A name without its .gz, which in any case means the same."""
    return name[: -len(GZ)] if name.lower().endswith(GZ) else name


def _file(path: str | Path, name: str) -> File:
    try:
        about = data_roots.stat(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    return File(os.fspath(path), name, about.st_size, about.st_mtime_ns)


class _opened:
    """A file's content, unpacked if it is a .gz, and a function that tells how much of the file itself was read."""

    def __init__(self, file: File) -> None:
        self._file = file

    def __enter__(self) -> tuple[IO[bytes], Callable[[], int]]:
        try:
            self._raw = data_roots.open_file(self._file.path, buffering=2**20)
        except OSError as error:
            raise _unreadable(self._file.path, error) from None
        packed = self._file.path.lower().endswith(GZ)
        content: IO[bytes] = io.BufferedReader(gzip.GzipFile(fileobj=self._raw)) if packed else self._raw
        return content, self._raw.tell

    def __exit__(self, *_: object) -> None:
        self._raw.close()


def _blocks(content: IO[bytes]) -> Iterator[bytes]:
    """A whole text, or, if it is long, blocks that end at a line's end, or at least not inside a letter."""
    rest = b""
    while read := content.read(BLOCK_BYTES - len(rest)):
        block = rest + read
        if len(block) < BLOCK_BYTES:
            rest = block
            continue
        end = block.rfind(b"\n") + 1 or _before_letter(block)
        yield block[:end]
        rest = block[end:]
    if rest:
        yield rest


def _before_letter(block: bytes) -> int:
    """Where the last, perhaps unfinished, UTF-8 letter of a block begins."""
    for back in range(1, 5):
        if block[-back] & 0xC0 != 0x80:
            return len(block) - back
    return len(block)


def _json_texts(file: File, content: IO[bytes], text_field: str) -> Iterator[str]:
    for number, line in enumerate(iter(lambda: content.readline(LINE_BYTES), b""), 1):
        if len(line) == LINE_BYTES:
            message = f"{file.path}:{number} is longer than {LINE_BYTES >> 20} MB. Cut that document."
            raise DataError(message, "source")
        if not line.removeprefix(BOM_UTF8).strip():
            continue
        text = _text_of(f"{file.path}:{number}", line, text_field)
        # JSON can spell halves of letters (\ud800), which no UTF-8 can hold.
        yield text if text.isascii() else text.encode("utf-8", "replace").decode()


def _text_of(where: str, line: bytes, text_field: str) -> str:
    try:
        found = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise DataError(f"{where} is not UTF-8. Write the file as UTF-8, one JSON object a line.", "source") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({error}). Mend or remove that line.", "source") from None
    text = found.get(text_field) if isinstance(found, dict) else None
    if isinstance(text, str):
        return text
    if isinstance(found, dict) and text_field in found:
        has = f"that is {json.dumps(text)[:40]}. Mend or remove that line."
        raise DataError(f'{where} has no text called "{text_field}": {has}', "text_field")
    fields = ", ".join(map(str, found))[:200] if isinstance(found, dict) else ""
    has = f"an object with {fields or 'nothing'}" if isinstance(found, dict) else f"a {type(found).__name__}"
    raise DataError(f'{where} has no text called "{text_field}": it is {has}. Name the right one.', "text_field")


def _unreadable(path: object, error: OSError) -> DataError:
    if isinstance(error, data_roots.OutsideRoots):
        remedy = "Copy it into one, or ask a sysadmin: VIGIL_DATA_ROOTS names them."
        return DataError(f"{path} can't be read: {error.strerror}. {remedy}", "source")
    if isinstance(error, FileNotFoundError):
        return DataError(f"{path} does not exist. Name a path that the nodes see, too.", "source")
    if isinstance(error, PermissionError):
        return DataError(f"{path} may not be read by the job's user. Give it the right to (chmod, setfacl).", "source")
    return DataError(f"{path} can't be read ({error.strerror or error}). Name another, or mend it.", "source")
