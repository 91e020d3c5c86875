"""A run's tokens, whatever it names: the standard library, a folder of texts, JSON lines, or shards made before."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from training.corpus import cache, documents
from training.corpus.documents import STDLIB, Source
from training.corpus.errors import DataError
from training.corpus.making import LAYOUT, Progress, make_shards
from training.corpus.shards import Index, are_in, identity_of, is_whole, read_index
from training.corpus.tokenizer import AUTO, Tokenizer, load
from training.data import Prepared
from training.runtime import data_roots

Tell = Callable[[Progress | None], None]
"""Called every second or so while data is being made: with how far it is, where that is known."""


@dataclass(frozen=True)
class CorpusOptions:
    """What a run asks for; the words of its options."""

    source: str = STDLIB
    tokenizer: str = AUTO
    suffixes: str = ".txt .md"
    text_field: str = "text"
    validation_percent: float = 5.0


def prepare(
    folder: Path, wanted: CorpusOptions, identity: str | None = None, tell: Tell = lambda progress: None
) -> Prepared:
    """Tokens on disk, made in `folder` on first use. `identity` asks for the very data that a checkpoint has seen."""
    if identity and is_whole(folder / identity):
        return _prepared(folder / identity, identity)
    if wanted.source != STDLIB and are_in(shards := _path(wanted.source)):
        return _ready_made(shards, wanted, identity)
    tokenizer = load(wanted.tokenizer)
    source = _source(wanted, tell)
    current = f"{source.label}+{tokenizer.id.label}+{_fingerprint(source, tokenizer, wanted)}"
    if identity and identity != current:
        raise _changed(identity, current, tokenizer.id.label, f"is not in {folder} any more")

    def make(staging: Path, touch: Callable[[], None]) -> None:
        def told(progress: Progress) -> None:
            touch()
            tell(progress)

        make_shards(staging, source, tokenizer, validation_percent=wanted.validation_percent, tell=told)

    cache.keep(folder / current, make, lambda: tell(None))
    return _prepared(folder / current, current)


def _ready_made(shards: Path, wanted: CorpusOptions, identity: str | None) -> Prepared:
    index = read_index(shards)
    if wanted.tokenizer != AUTO and (asked := load(wanted.tokenizer).id).sha256 != index.tokenizer.sha256:
        message = (
            f'is {asked.label}, but the shards in {shards} were made with {index.tokenizer.label}. Write "{AUTO}", or '
            "make them anew."
        )
        raise DataError(message, "tokenizer")
    current = identity_of(shards, index)
    if identity and identity != current:
        raise _changed(identity, current, index.tokenizer.label, f"is not what lies in {shards} now")
    return _prepared(shards, current, index)


def _prepared(path: Path, identity: str, index: Index | None = None) -> Prepared:
    index = index or read_index(path)
    facts = {
        "tokenizer": index.tokenizer.label,
        "vocabulary": index.tokenizer.vocabulary,
        "documents": index.documents,
        "duplicates": index.duplicate_documents,
        "duplicate_bytes": index.duplicate_bytes,
        "tokens": index.tokens,
        "bytes": index.bytes,
        "shards": len(index.files),
    }
    return Prepared(path, identity, vocabulary=index.tokenizer.vocabulary, facts=facts)


def _source(wanted: CorpusOptions, tell: Tell) -> Source:
    if wanted.source == STDLIB:
        return documents.standard_library()
    suffixes = tuple("." + word.lstrip("*.") for word in wanted.suffixes.replace(",", " ").split())
    return documents.find(
        _path(wanted.source), suffixes=suffixes, text_field=wanted.text_field, tell=lambda: tell(None)
    )


def _path(source: str) -> Path:
    return Path(source).expanduser()


def _fingerprint(source: Source, tokenizer: Tokenizer, wanted: CorpusOptions) -> str:
    about = f"{LAYOUT} {source.fingerprint()} {tokenizer.id.sha256} {wanted.validation_percent}"
    if wanted.source != STDLIB and data_roots.are_set():
        # Names, sizes and times can be made to match those of what others have read, and may not be read here.
        about += f" {os.path.realpath(_path(wanted.source))}"
    return hashlib.sha256(about.encode()).hexdigest()[:10]


def _changed(identity: str, current: str, label: str, what: str) -> DataError:
    before = identity.split("+")[1] if identity.count("+") == 2 else ""
    if before and before != label:
        message = (
            f"is {label} now, but this run's tokens were made with {before}. Put that tokenizer.json back, or clone "
            "the job to start afresh."
        )
        return DataError(message, "tokenizer")
    message = (
        f"this run was trained on {identity}, which {what}; today's data is {current}. Resume where that data is, or "
        "clone the job to start afresh."
    )
    return DataError(message, "source")
