"""Text files in the formats that people use, and the shards made of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, settings

from tests.examples import examples
from training.corpus.preparing import CorpusOptions, prepare
from training.corpus.shards import read_index
from training.corpus.tokenizer import END_OF_BYTES
from training.data import Prepared

relaxed = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=examples(50)
)


def numbered(count: int = 200) -> list[str]:
    return [f"Document {number}.\nThe siskin sings at dawn, {number} times." for number in range(count)]


def folder_of(path: Path, contents: list[str]) -> Path:
    for number, text in enumerate(contents):
        file = path / f"part-{number % 3}" / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())
    return path


def lines_of(path: Path, contents: list[str], field: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n" for text in contents))
    return path


def tokens_of(made: Path, split: str) -> bytes:
    index = read_index(made)
    return b"".join((made / shard.file).read_bytes() for shard in getattr(index, split))


def documents_of(made: Path) -> Counter[str]:
    found = [
        part for split in ("train", "validation") for part in tokens_of(made, split).split(bytes([END_OF_BYTES]))[:-1]
    ]
    return Counter(part.decode() for part in found)


def prepared(cache: Path, source: Path, **options: Any) -> Prepared:
    return prepare(cache, CorpusOptions(str(source), **options))
