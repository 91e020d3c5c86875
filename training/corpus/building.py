"""Turn documents into token shards: duplicates dropped, validation chosen by content, everything streamed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.corpus.documents import TextSource
from training.corpus.duplicates import DigestSet, digest
from training.corpus.errors import DataError
from training.corpus.owners import Owners
from training.corpus.shards import SHARD_BYTES, ShardIndex, ShardWriter
from training.corpus.tokenizer import Tokenizer, Tokens
from training.data import Split

LAYOUT = 2
"""Version of the algorithm: increased when the same source would give other shards."""
BATCH_CHARACTERS = 2**22
BATCH_TEXTS = 1024
PROGRESS_SECONDS = 1.0


@dataclass(frozen=True)
class PartSizes:
    """A document of more than `whole` characters is divided among the splits in parts of about `letters`, by lines."""

    whole: int
    letters: int


PART_SIZES = (PartSizes(2**20, 2**16), PartSizes(2**13, 2**11), PartSizes(2**10, 2**9))
"""Alternatives to the first are for data so small that validation would be empty: one short book, a few pages."""


@dataclass
class ShardProgress:
    """How far the making of shards is."""

    source: str
    total_bytes: int
    began_at: float
    bytes: int = 0
    documents: int = 0

    @property
    def percent(self) -> float:
        return 100 * self.bytes / max(1, self.total_bytes)

    def facts(self) -> dict[str, object]:
        return {
            "source": self.source,
            "documents": self.documents,
            "bytes": self.bytes,
            "total_bytes": self.total_bytes,
            "percent": round(self.percent, 1),
        }

    def __str__(self) -> str:
        rate = self.bytes / 1e6 / max(1e-9, time.monotonic() - self.began_at)
        return (
            f"tokens of {self.source}: {self.documents:,} documents, {self.bytes / 1e6:,.0f} of "
            f"{self.total_bytes / 1e6:,.0f} MB ({self.percent:.0f} %), {rate:,.1f} MB/s"
        )


def make_shards(
    folder: Path,
    source: TextSource,
    tokenizer: Tokenizer,
    *,
    validation_percent: float,
    shard_bytes: int = SHARD_BYTES,
    on_progress: Callable[[ShardProgress], None] = lambda progress: None,
) -> ShardIndex:
    """Fill an empty folder with shards and their index. Raises DataError if one of the splits would be empty."""
    for parts in PART_SIZES:
        making = _ShardBuilder(folder, source, tokenizer, validation_percent, shard_bytes, parts, on_progress)
        index = making.run()
        if all(sum(shard.tokens for shard in index.shards(split)) for split in ("train", "validation")):
            making.owners.write(folder)
            index.write(folder)
            return index
        for shard in index.files:
            (folder / shard.file).unlink()
    if not index.documents:
        raise DataError(f"{source.label} contains no text: all {index.empty:,} documents are blank.", "source")
    message = (
        f"{validation_percent:g} % of {source.label} leaves training or validation without data. Choose another "
        "percentage, or use more data."
    )
    raise DataError(message, "validation_percent")


class _ShardBuilder:
    def __init__(
        self,
        folder: Path,
        source: TextSource,
        tokenizer: Tokenizer,
        validation_percent: float,
        shard_bytes: int,
        parts: PartSizes,
        on_progress: Callable[[ShardProgress], None],
    ) -> None:
        self._source, self._tokenizer, self._parts, self._on_progress = source, tokenizer, parts, on_progress
        self._validation_limit = validation_percent / 100 * 2**64
        dtype = tokenizer.id.dtype
        tokens = max(1, shard_bytes // np.dtype(dtype).itemsize)
        self._writers: dict[Split, ShardWriter] = {
            "train": ShardWriter(folder, "train", dtype, tokens),
            "validation": ShardWriter(folder, "validation", dtype, tokens),
        }
        self.owners = Owners()
        self._end = np.array([tokenizer.id.end_of_document], dtype=dtype)
        self._duplicates = self._duplicate_bytes = self._empty = 0
        self._progress = ShardProgress(source.label, source.size, time.monotonic())
        self._reported_at = 0.0

    def run(self) -> ShardIndex:
        try:
            waiting: list[tuple[Split, str, str]] = []
            letters = 0
            for split, text, owner in self._texts():
                waiting.append((split, text, owner))
                letters += len(text)
                if letters >= BATCH_CHARACTERS or len(waiting) >= BATCH_TEXTS:
                    self._write(waiting)
                    waiting, letters = [], 0
            self._write(waiting)
            for writer in self._writers.values():
                writer.end_shard()
        finally:
            for writer in self._writers.values():
                writer.abandon()
        return ShardIndex(
            self._tokenizer.id,
            self._tokenizer.id.dtype,
            train=self._writers["train"].shards,
            validation=self._writers["validation"].shards,
            documents=self._progress.documents,
            duplicate_documents=self._duplicates,
            duplicate_bytes=self._duplicate_bytes,
            empty=self._empty,
        )

    def _texts(self) -> Iterator[tuple[Split, str, str]]:
        """Yield each distinct document, divided by split, with its owner."""
        digests = DigestSet()
        for text, read, owner in self._source.documents():
            self._progress.bytes = read
            self._report()
            if not text or text.isspace():
                self._empty += 1
            elif not digests.add(digest(text)):
                self._duplicates += 1
                self._duplicate_bytes += len(text.encode())
            else:
                self._progress.documents += 1
                yield from ((split, part, owner) for split, part in self._divide(text))

    def _divide(self, text: str) -> Iterator[tuple[Split, str]]:
        if len(text) <= self._parts.whole:
            yield self._split_of(text), text
            return
        divided: dict[Split, list[str]] = {"train": [], "validation": []}
        for part in _split_text(text, self._parts.letters):
            divided[self._split_of(part)].append(part)
        for split, parts in divided.items():
            if parts:
                yield split, "".join(parts)

    def _split_of(self, text: str) -> Split:
        """Return the split of a text, which depends on the text alone.

        It stays the same whatever other data is added or removed.
        """
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, person=b"split").digest(), "big")
        return "validation" if number < self._validation_limit else "train"

    def _write(self, batch: list[tuple[Split, str, str]]) -> None:
        if not batch:
            return
        encoded = self._encode([text for _, text, _ in batch])
        for (split, _, owner), tokens in zip(batch, encoded, strict=True):
            self.owners.add(split, owner, len(tokens) + 1)
            self._writers[split].add(tokens)
            self._writers[split].add(self._end)
        self._report()

    def _encode(self, texts: list[str]) -> list[Tokens]:
        """Tokenise texts while reporting progress.

        A long text may take minutes, during which the run would otherwise seem hung.
        """
        with ThreadPoolExecutor(1) as executor:
            encoding = executor.submit(self._tokenizer.encode, texts)
            while not wait([encoding], PROGRESS_SECONDS).done:
                self._report()
            return encoding.result()

    def _report(self) -> None:
        if (now := time.monotonic()) >= self._reported_at + PROGRESS_SECONDS:
            self._reported_at = now
            self._on_progress(self._progress)


def _split_text(text: str, letters: int) -> Iterator[str]:
    """Yield parts of at least `letters` characters, ending at a line's end or a blank, else of twice that length."""
    start = 0
    while start < len(text):
        end = -1
        for mark in ("\n", " "):
            end = text.find(mark, start + letters, start + 2 * letters) + 1
            if end:
                break
        end = end or start + 2 * letters
        yield text[start:end]
        start = end
