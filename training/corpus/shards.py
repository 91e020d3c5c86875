"""Token shards on disk: flat files of little-endian tokens, and index.json, which describes them (docs/how-to/data.md).

{"format": "vigil-tokens", "version": 1, "dtype": "uint16", "documents": 812, "tokens": 5400123,
 "tokenizer": {"name": "bpe", "sha256": "…", "vocabulary": 32000, "end_of_document": 2},
 "duplicates": {"documents": 3, "bytes": 8112}, "empty": 0,
 "train": [{"file": "train-00000.bin", "tokens": 5130000, "sha256": "…"}], "validation": […]}
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, get_args

import numpy as np

from training.corpus.errors import DataError
from training.corpus.tokenizer import TokenizerId, Tokens, safe_name
from training.data import Split
from training.runtime import data_roots

INDEX = "index.json"
FORMAT, VERSION = "vigil-tokens", 1
SPLITS: tuple[Split, ...] = get_args(Split)
SHARD_BYTES = 128 * 2**20
DTYPES = ("uint8", "uint16", "uint32")
INDEX_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Shard:
    file: str
    tokens: int
    sha256: str = ""


@dataclass(frozen=True)
class ShardIndex:
    """The content of index.json."""

    tokenizer: TokenizerId
    dtype: str
    train: list[Shard]
    validation: list[Shard]
    documents: int = 0
    duplicate_documents: int = 0
    duplicate_bytes: int = 0
    empty: int = 0

    def shards(self, split: Split) -> list[Shard]:
        return self.train if split == "train" else self.validation

    @property
    def files(self) -> list[Shard]:
        return [*self.train, *self.validation]

    @property
    def tokens(self) -> int:
        return sum(shard.tokens for shard in self.files)

    @property
    def bytes(self) -> int:
        return self.tokens * np.dtype(self.dtype).itemsize

    def write(self, folder: Path) -> None:
        """Write the index durably, and last of all: a folder without it counts as empty."""
        content: dict[str, object] = {
            "format": FORMAT,
            "version": VERSION,
            "tokenizer": asdict(self.tokenizer),
            "dtype": self.dtype,
            "documents": self.documents,
            "tokens": self.tokens,
            "duplicates": {"documents": self.duplicate_documents, "bytes": self.duplicate_bytes},
            "empty": self.empty,
        }
        content |= {split: [asdict(shard) for shard in self.shards(split)] for split in SPLITS}
        with open(folder / INDEX, "w") as file:
            json.dump(content, file, indent=1)
            file.flush()
            os.fsync(file.fileno())


def has_index(folder: Path) -> bool:
    """Return whether a folder has an index. False if it cannot be accessed: the next read reports why."""
    return data_roots.is_file(folder / INDEX)


def read_index(folder: Path) -> ShardIndex:
    """Read the index of a folder, and check the length of each shard, without reading any.

    Raises DataError if the index is not ours, or a shard has another length.
    """
    path = folder / INDEX
    try:
        with data_roots.open_file(path) as file:
            content = json.loads(file.read(INDEX_BYTES))
    except OSError as error:
        raise DataError(f"{path} can't be read ({error.strerror}). Name a folder of token shards.", "source") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}). Create the shards again.", "source") from None
    try:
        index = _index(content)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        problem = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
        raise DataError(
            f"{path} does not describe token shards: {problem}. See docs/how-to/data.md.", "source"
        ) from None
    for shard in index.files:
        _check_length(folder / shard.file, shard.tokens * np.dtype(index.dtype).itemsize)
    return index


def is_complete(folder: Path) -> bool:
    """Return whether all shards are there with the right length: a shared cache is not trusted blindly."""
    try:
        read_index(folder)
    except DataError:
        return False
    return True


def verify(folder: Path) -> ShardIndex:
    """Read every shard; raise DataError naming the first that is not as it was written."""
    index = read_index(folder)
    for shard in index.files:
        if not shard.sha256:
            raise DataError(f"{folder / shard.file} has no sha256 in {INDEX} to compare with.", "source")
        try:
            with open(folder / shard.file, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise _unreadable(folder / shard.file, error) from None
        if digest != shard.sha256:
            raise DataError(f"{folder / shard.file} is damaged: its sha256 differs. Create it again.", "source")
    return index


def identity_of(folder: Path, index: ShardIndex) -> str:
    """Return a name for existing shards, derived from their index."""
    with data_roots.open_file(folder / INDEX) as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    return f"{safe_name(folder.name)}+{index.tokenizer.label}+{content[:10]}"


@dataclass
class ShardWriter:
    """Writes one split's tokens, shard after shard."""

    folder: Path
    split: Split
    dtype: str
    shard_tokens: int
    shards: list[Shard] = field(default_factory=list)
    _file: IO[bytes] | None = None
    _written: int = 0
    _digest: Any = None

    def add(self, tokens: Tokens) -> None:
        """Append `tokens` of the dtype; a document may begin in one shard and end in the next."""
        while len(tokens):
            if self._file is None:
                path = self.folder / f"{self.split}-{len(self.shards):05d}.bin"
                self._file = open(path, "wb", buffering=2**20)  # noqa: SIM115
                self._written, self._digest = 0, hashlib.sha256()
            part = tokens[: self.shard_tokens - self._written]
            content = part.astype(np.dtype(self.dtype).newbyteorder("<"), copy=False).tobytes()
            self._file.write(content)
            self._digest.update(content)
            self._written += len(part)
            tokens = tokens[len(part) :]
            if self._written == self.shard_tokens:
                self.end_shard()

    def end_shard(self) -> None:
        if self._file is None:
            return
        name = os.path.basename(self._file.name)
        with self._file as file:
            file.flush()
            os.fsync(file.fileno())
        self.shards.append(Shard(name, self._written, self._digest.hexdigest()))
        self._file = None

    def abandon(self) -> None:
        """Discard the open shard; what is still buffered may not fit on the disk."""
        if self._file is not None:
            file, self._file = self._file, None
            with suppress(OSError):
                file.close()


def _index(content: Mapping[str, Any]) -> ShardIndex:
    if content.get("format") != FORMAT or content.get("version") != VERSION:
        raise ValueError(f'its format is not "{FORMAT}", version {VERSION}')
    tokenizer_content = content["tokenizer"]
    tokenizer = TokenizerId(
        str(tokenizer_content["name"]),
        str(tokenizer_content["sha256"]),
        _count(tokenizer_content, "vocabulary"),
        _count(tokenizer_content, "end_of_document"),
    )
    dtype = content["dtype"]
    if dtype not in DTYPES:
        raise ValueError(f"its dtype {dtype!r} is none of {', '.join(DTYPES)}")
    if tokenizer.vocabulary > np.iinfo(dtype).max + 1 or tokenizer.vocabulary < 2:
        raise ValueError(f"a vocabulary of {tokenizer.vocabulary} does not fit {dtype}")
    duplicates = content.get("duplicates", {})
    return ShardIndex(
        tokenizer,
        dtype,
        train=[_shard(item) for item in content["train"]],
        validation=[_shard(item) for item in content["validation"]],
        documents=int(content.get("documents", 0)),
        duplicate_documents=int(duplicates.get("documents", 0)),
        duplicate_bytes=int(duplicates.get("bytes", 0)),
        empty=int(content.get("empty", 0)),
    )


def _shard(item: Mapping[str, Any]) -> Shard:
    name = item["file"]
    is_name = isinstance(name, str) and name.isprintable() and name == os.path.basename(name)
    if not is_name or not name or name.startswith("."):
        raise ValueError(f"{name!r} is not a file in the same folder")
    return Shard(name, _count(item, "tokens"), str(item.get("sha256", "")))


def _count(item: Mapping[str, Any], name: str) -> int:
    value = item[name]
    if type(value) is not int or value < 0:
        raise ValueError(f"{name} is {value!r}, not a count")
    return value


def _check_length(path: Path, expected: int) -> None:
    try:
        size = data_roots.stat(path).st_size
    except OSError as error:
        raise _unreadable(path, error) from None
    if size != expected:
        how = "ends early" if size < expected else "is longer than it was"
        raise DataError(f"{path} {how}: {size:,} bytes instead of {expected:,}. Copy it again.", "source")


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"{path} can't be read ({error.strerror}). Copy it again.", "source")
