"""Provide a run's tokens, whatever their source.

Sources are the standard library, a folder of texts, JSON lines, or existing shards.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from training.corpus import cache, documents
from training.corpus.building import LAYOUT, ShardProgress, make_shards
from training.corpus.documents import STDLIB, TextSource
from training.corpus.errors import DataError
from training.corpus.shards import ShardIndex, has_index, identity_of, is_complete, read_index
from training.corpus.tokenizer import AUTO, Tokenizer, load
from training.data import Prepared
from training.runtime import data_roots

OnShardProgress = Callable[[ShardProgress | None], None]
"""Called about every second while data is being made, with the progress if it is known."""


@dataclass(frozen=True)
class CorpusOptions:
    """The options of a run that determine its data, by the names of the recipe's options."""

    source: str = STDLIB
    tokenizer: str = AUTO
    suffixes: str = ".txt .md"
    text_field: str = "text"
    validation_percent: float = 5.0


def prepare(
    folder: Path,
    options: CorpusOptions,
    identity: str | None = None,
    on_progress: OnShardProgress = lambda progress: None,
) -> Prepared:
    """Return tokens on disk, made in `folder` on first use. `identity`: the exact data that a checkpoint had.

    Raises DataError, also if that data is no longer available.
    """
    if identity and is_complete(folder / identity):
        return _prepared(folder / identity, identity)
    if options.source != STDLIB and has_index(shards := _path(options.source)):
        return _existing_shards(shards, options, identity)
    tokenizer = load(options.tokenizer)
    source = _source(options, on_progress)
    current = f"{source.label}+{tokenizer.id.label}+{_fingerprint(source, tokenizer, options)}"
    if identity and identity != current:
        raise _data_changed(identity, current, tokenizer.id.label, f"is no longer in {folder}")

    def make(staging: Path, touch: Callable[[], None]) -> None:
        def report(progress: ShardProgress) -> None:
            touch()
            on_progress(progress)

        make_shards(staging, source, tokenizer, validation_percent=options.validation_percent, on_progress=report)

    cache.ensure(folder / current, make, lambda: on_progress(None))
    return _prepared(folder / current, current)


def _existing_shards(shards: Path, options: CorpusOptions, identity: str | None) -> Prepared:
    index = read_index(shards)
    if options.tokenizer != AUTO and (requested := load(options.tokenizer).id).sha256 != index.tokenizer.sha256:
        message = (
            f"is {requested.label}, but the shards in {shards} were made with {index.tokenizer.label}. Write "
            f'"{AUTO}", or '
            "create them again."
        )
        raise DataError(message, "tokenizer")
    current = identity_of(shards, index)
    if identity and identity != current:
        raise _data_changed(identity, current, index.tokenizer.label, f"is not what is in {shards} now")
    return _prepared(shards, current, index)


def _prepared(path: Path, identity: str, index: ShardIndex | None = None) -> Prepared:
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


def _source(options: CorpusOptions, on_progress: OnShardProgress) -> TextSource:
    if options.source == STDLIB:
        return documents.standard_library()
    suffixes = tuple("." + word.lstrip("*.") for word in options.suffixes.replace(",", " ").split())
    return documents.find(
        _path(options.source), suffixes=suffixes, text_field=options.text_field, on_progress=lambda: on_progress(None)
    )


def _path(source: str) -> Path:
    return Path(source).expanduser()


def _fingerprint(source: TextSource, tokenizer: Tokenizer, options: CorpusOptions) -> str:
    text = f"{LAYOUT} {source.fingerprint()} {tokenizer.id.sha256} {options.validation_percent}"
    if options.source != STDLIB and data_roots.are_set():
        # Without the path, forged names, sizes and times would give a user data cached from files of others.
        text += f" {os.path.realpath(_path(options.source))}"
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _data_changed(identity: str, current: str, label: str, reason: str) -> DataError:
    before = identity.split("+")[1] if identity.count("+") == 2 else ""
    if before and before != label:
        message = (
            f"is {label} now, but this run's tokens were made with {before}. Restore that tokenizer.json, or clone "
            "the job to start over."
        )
        return DataError(message, "tokenizer")
    message = (
        f"this run was trained on {identity}, which {reason}; the data is {current} now. Resume where that data is, or "
        "clone the job to start over."
    )
    return DataError(message, "source")
