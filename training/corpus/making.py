"""Documents to token shards: duplicates dropped, validation chosen by content, everything streamed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.corpus.documents import Source
from training.corpus.duplicates import Seen, digest
from training.corpus.errors import DataError
from training.corpus.owners import Owners
from training.corpus.shards import SHARD_BYTES, Index, Writer
from training.corpus.tokenizer import Tokenizer, Tokens
from training.data import Split

LAYOUT = 2
"""Raised when the same source would give other shards."""
BATCH_LETTERS = 2**22
BATCH_TEXTS = 1024
TELL_SECONDS = 1.0


@dataclass(frozen=True)
class Parts:
    """A document of more than `whole` letters is divided among the splits in parts of about `letters`, by lines."""

    whole: int
    letters: int


PARTS = (Parts(2**20, 2**16), Parts(2**13, 2**11), Parts(2**10, 2**9))
"""Those behind the first are for data so small that nothing is left for validation: one short book, a few pages."""


@dataclass
class Progress:
    """How far the making of shards is."""

    source: str
    total_bytes: int
    began: float
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
        rate = self.bytes / 1e6 / max(1e-9, time.monotonic() - self.began)
        return (
            f"tokens of {self.source}: {self.documents:,} documents, {self.bytes / 1e6:,.0f} of "
            f"{self.total_bytes / 1e6:,.0f} MB ({self.percent:.0f} %), {rate:,.1f} MB/s"
        )


def make_shards(
    folder: Path,
    source: Source,
    tokenizer: Tokenizer,
    *,
    validation_percent: float,
    shard_bytes: int = SHARD_BYTES,
    tell: Callable[[Progress], None] = lambda progress: None,
) -> Index:
    """Fills an empty folder with shards and their index; DataError if there is nothing for one of the splits."""
    for parts in PARTS:
        making = _Making(folder, source, tokenizer, validation_percent, shard_bytes, parts, tell)
        index = making.run()
        if all(sum(shard.tokens for shard in index.shards(split)) for split in ("train", "validation")):
            making.owners.write(folder)
            index.write(folder)
            return index
        for shard in index.files:
            (folder / shard.file).unlink()
    if not index.documents:
        raise DataError(f"{source.label} has no text in it: all {index.empty:,} documents are blank.", "source")
    message = (
        f"{validation_percent:g} % of {source.label} leaves nothing for one of training and validation. Name another "
        "part, or more data."
    )
    raise DataError(message, "validation_percent")


class _Making:
    def __init__(
        self,
        folder: Path,
        source: Source,
        tokenizer: Tokenizer,
        validation_percent: float,
        shard_bytes: int,
        parts: Parts,
        tell: Callable[[Progress], None],
    ) -> None:
        self._source, self._tokenizer, self._parts, self._tell = source, tokenizer, parts, tell
        self._held_out = validation_percent / 100 * 2**64
        dtype = tokenizer.id.dtype
        tokens = max(1, shard_bytes // np.dtype(dtype).itemsize)
        self._writers: dict[Split, Writer] = {
            "train": Writer(folder, "train", dtype, tokens),
            "validation": Writer(folder, "validation", dtype, tokens),
        }
        self.owners = Owners()
        self._end = np.array([tokenizer.id.end_of_document], dtype=dtype)
        self._duplicates = self._duplicate_bytes = self._empty = 0
        self._progress = Progress(source.label, source.size, time.monotonic())
        self._told = 0.0

    def run(self) -> Index:
        try:
            waiting: list[tuple[Split, str, str]] = []
            letters = 0
            for split, text, owner in self._texts():
                waiting.append((split, text, owner))
                letters += len(text)
                if letters >= BATCH_LETTERS or len(waiting) >= BATCH_TEXTS:
                    self._write(waiting)
                    waiting, letters = [], 0
            self._write(waiting)
            for writer in self._writers.values():
                writer.end_shard()
        finally:
            for writer in self._writers.values():
                writer.abandon()
        return Index(
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
        """Each document once, as what of it goes to each split, and whose it is."""
        seen = Seen()
        for text, read, owner in self._source.documents():
            self._progress.bytes = read
            self._say()
            if not text or text.isspace():
                self._empty += 1
            elif not seen.add(digest(text)):
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
        for part in _cut(text, self._parts.letters):
            divided[self._split_of(part)].append(part)
        for split, parts in divided.items():
            if parts:
                yield split, "".join(parts)

    def _split_of(self, text: str) -> Split:
        """The split of a text, by that alone: it stays where it is, whatever comes to the data or leaves it."""
        number = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, person=b"split").digest(), "big")
        return "validation" if number < self._held_out else "train"

    def _write(self, batch: list[tuple[Split, str, str]]) -> None:
        if not batch:
            return
        encoded = self._encoded([text for _, text, _ in batch])
        for (split, _, owner), tokens in zip(batch, encoded, strict=True):
            self.owners.add(split, owner, len(tokens) + 1)
            self._writers[split].add(tokens)
            self._writers[split].add(self._end)
        self._say()

    def _encoded(self, texts: list[str]) -> list[Tokens]:
        """The tokens of texts, told of meanwhile: one long text may take a library minutes, and who is silent is taken
        for dead."""
        with ThreadPoolExecutor(1) as beside:
            encoding = beside.submit(self._tokenizer.encode, texts)
            while not wait([encoding], TELL_SECONDS).done:
                self._say()
            return encoding.result()

    def _say(self) -> None:
        if (now := time.monotonic()) >= self._told + TELL_SECONDS:
            self._told = now
            self._tell(self._progress)


def _cut(text: str, letters: int) -> Iterator[str]:
    """Parts of at least so many letters, ending at a line's end, or a blank, or, failing both, at twice as many."""
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
