"""Read texts as a stream of documents: from files of a folder, JSON lines, or Python's standard library.

Everything is read inside the allocation as the job's user. Files may be larger than memory: texts are read in blocks,
JSON line by line.
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
from training.corpus.tokenizer import safe_name
from training.runtime import data_roots

STDLIB = "stdlib"
EXCLUDED = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)
"""Folders in the standard library that are not part of it, or hardly contain text."""
BLOCK_BYTES = 16 * 2**20
"""A longer text is read as several, split at line ends."""
LINE_BYTES = 256 * 2**20
PROGRESS_FILES = 1000
JSONL = (".jsonl", ".ndjson")
GZ = ".gz"


@dataclass(frozen=True, slots=True)
class TextFile:
    path: str
    name: str
    """Path below the source's folder."""
    size: int
    """Size in bytes."""
    changed_ns: int

    @property
    def owner(self) -> str:
        """Return the file's owner in a federated split.

        It is the file's top-level folder in the source, or its own name without the ending.
        """
        first, _, below = self.name.partition(os.sep)
        owner = first if below else _unpacked(first).rpartition(".")[0] or first
        return owner.encode("utf-8", "replace").decode()


@dataclass(frozen=True)
class TextSource:
    """Files whose texts make up the data, in the order in which they are read."""

    label: str
    files: list[TextFile] = field(repr=False)
    text_field: str = "text"
    strict: bool = True
    """Whether texts that are not UTF-8 are refused; otherwise invalid bytes are replaced."""

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def fingerprint(self) -> str:
        """Return a hash that changes when a file is added, removed or written to; no file is read for it."""
        digest = hashlib.sha256(f"{self.text_field} {self.strict}\n".encode())
        for file in self.files:
            # The standard library is the same wherever and whenever it was installed.
            changed = file.changed_ns if self.strict else 0
            digest.update(f"{file.name}\0{file.size}\0{changed}\n".encode(errors="surrogateescape"))
        return digest.hexdigest()

    def documents(self) -> Iterator[tuple[str, int, str]]:
        """Yield (text, bytes of the source read so far, owner)."""
        before = 0
        for file in self.files:
            with _OpenFile(file) as (content, read):
                is_json = _unpacked(file.name).lower().endswith(JSONL)
                texts = _json_texts(file, content, self.text_field) if is_json else self._texts(file, content)
                try:
                    for text in texts:
                        yield text, before + min(read(), file.size), file.owner
                except (EOFError, zlib.error, gzip.BadGzipFile):
                    raise DataError(f"{file.path} is a damaged or unfinished .gz. Copy it again.", "source") from None
                except OSError as error:
                    raise _unreadable(file.path, error) from None
            before += file.size

    def _texts(self, file: TextFile, content: IO[bytes]) -> Iterator[str]:
        offset = 0
        for block in _blocks(content):
            try:
                text = block.decode("utf-8-sig" if not offset else "utf-8", "strict" if self.strict else "replace")
            except UnicodeDecodeError as error:
                message = (
                    f"{file.path} is not UTF-8 (byte 0x{error.object[error.start]:02X} at {offset + error.start:,}). "
                    "Convert it (iconv -f latin1 -t utf-8), or exclude it by its ending (suffixes)."
                )
                raise DataError(message, "source") from None
            offset += len(block)
            yield text


def library_folder() -> Path:
    return Path(sysconfig.get_path("stdlib"))


def standard_library() -> TextSource:
    root = library_folder()
    files = list(_walk(root, (".py",), excluded=EXCLUDED))
    return TextSource(f"stdlib-{sys.version_info.major}.{sys.version_info.minor}", files, strict=False)


def find(
    path: Path, *, suffixes: tuple[str, ...], text_field: str, on_progress: Callable[[], None] = lambda: None
) -> TextSource:
    """Return the texts and JSON lines at a path: a file, or all files in a folder and below.

    Raises DataError if there are none.
    """
    try:
        kind = data_roots.stat(path).st_mode
    except OSError as error:
        raise _unreadable(path, error) from None
    label = safe_name(_unpacked(path.name))
    if stat.S_ISDIR(kind):
        files = list(_walk(path, (*suffixes, *JSONL), on_progress=on_progress))
    elif stat.S_ISREG(kind):
        files = [_file(path, path.name)]
        label = safe_name(_unpacked(path.name).rpartition(".")[0] or path.name)
    else:
        raise DataError(f"{path} is neither a file nor a folder. Name one with texts.", "source")
    if not any(file.size for file in files):
        endings = ", ".join((*suffixes, *JSONL))
        what = "is empty" if stat.S_ISREG(kind) else f"contains no text: no file in it or below ends in {endings}"
        raise DataError(f"{path} {what}. Name another folder, or the endings of your files (suffixes).", "source")
    return TextSource(label, files, text_field)


def _walk(
    root: Path,
    suffixes: tuple[str, ...],
    *,
    excluded: frozenset[str] = frozenset(),
    on_progress: Callable[[], None] = lambda: None,
) -> Iterator[TextFile]:
    """Yield every regular file with such an ending, in the same order on every machine.

    Names that begin with a dot are left out. Links are followed; a folder that several links lead to is read once.
    """

    def refuse(error: OSError) -> None:
        raise _unreadable(error.filename, error)

    endings = tuple(ending for suffix in suffixes for ending in (suffix.lower(), suffix.lower() + GZ))
    visited: set[tuple[int, int]] = set()
    for folder, folders, names in os.walk(root, onerror=refuse, followlinks=True):
        try:
            data_roots.check_folder(folder)
        except data_roots.OutsideRoots as error:
            refuse(error)
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in visited:
            folders.clear()
            continue
        visited.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if name not in excluded and not name.startswith("."))
        for number, name in enumerate(sorted(names)):
            if number % PROGRESS_FILES == 0:
                on_progress()
            if name.lower().endswith(endings) and not name.startswith("."):
                path = os.path.join(folder, name)
                if data_roots.is_file(path):
                    yield _file(path, os.path.relpath(path, root))


def _unpacked(name: str) -> str:
    """Return a name without .gz, in upper or lower case."""
    return name[: -len(GZ)] if name.lower().endswith(GZ) else name


def _file(path: str | Path, name: str) -> TextFile:
    try:
        status = data_roots.stat(path)
    except OSError as error:
        raise _unreadable(path, error) from None
    return TextFile(os.fspath(path), name, status.st_size, status.st_mtime_ns)


class _OpenFile:
    """A file's content, unpacked if it is a .gz, and a function that returns how much of the file itself was read."""

    def __init__(self, file: TextFile) -> None:
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
    """Yield a whole text, or, if it is long, blocks that end at a line's end, or at least not inside a character."""
    rest = b""
    while read := content.read(BLOCK_BYTES - len(rest)):
        block = rest + read
        if len(block) < BLOCK_BYTES:
            rest = block
            continue
        end = block.rfind(b"\n") + 1 or _before_character(block)
        yield block[:end]
        rest = block[end:]
    if rest:
        yield rest


def _before_character(block: bytes) -> int:
    """Return where the last, perhaps incomplete, UTF-8 character of a block begins."""
    for back in range(1, 5):
        if block[-back] & 0xC0 != 0x80:
            return len(block) - back
    return len(block)


def _json_texts(file: TextFile, content: IO[bytes], text_field: str) -> Iterator[str]:
    for number, line in enumerate(iter(lambda: content.readline(LINE_BYTES), b""), 1):
        if len(line) == LINE_BYTES:
            message = f"{file.path}:{number} is longer than {LINE_BYTES >> 20} MB. Cut that document."
            raise DataError(message, "source")
        if not line.removeprefix(BOM_UTF8).strip():
            continue
        text = _text_of(f"{file.path}:{number}", line, text_field)
        # JSON can express half characters (\ud800), which UTF-8 cannot represent.
        yield text if text.isascii() else text.encode("utf-8", "replace").decode()


def _text_of(where: str, line: bytes, text_field: str) -> str:
    try:
        document = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise DataError(f"{where} is not UTF-8. Write the file as UTF-8, one JSON object per line.", "source") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({error}). Correct or remove that line.", "source") from None
    text = document.get(text_field) if isinstance(document, dict) else None
    if isinstance(text, str):
        return text
    if isinstance(document, dict) and text_field in document:
        has = f"that is {json.dumps(text)[:40]}. Correct or remove that line."
        raise DataError(f'{where} has no text called "{text_field}": {has}', "text_field")
    fields = ", ".join(map(str, document))[:200] if isinstance(document, dict) else ""
    has = f"an object with {fields or 'nothing'}" if isinstance(document, dict) else f"a {type(document).__name__}"
    raise DataError(f'{where} has no text called "{text_field}": it is {has}. Name the right one.', "text_field")


def _unreadable(path: object, error: OSError) -> DataError:
    if isinstance(error, data_roots.OutsideRoots):
        remedy = "Copy it into one, or ask a sysadmin: VIGIL_DATA_ROOTS names them."
        return DataError(f"{path} can't be read: {error.strerror}. {remedy}", "source")
    if isinstance(error, FileNotFoundError):
        return DataError(f"{path} does not exist. Name a path that the nodes can access.", "source")
    if isinstance(error, PermissionError):
        return DataError(f"{path} cannot be read by the job's user. Grant access (chmod, setfacl).", "source")
    return DataError(f"{path} can't be read ({error.strerror or error}). Name another, or correct it.", "source")
