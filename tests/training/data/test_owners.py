"""Test owners of tokens: stored next to the shards, and returned for every window."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from training.corpus import owners
from training.corpus.errors import DataError
from training.corpus.preparing import CorpusOptions, prepare
from training.corpus.shards import SPLITS, read_index
from training.corpus.windows import Windows, window_starts
from training.recipes import language

TEXTS = {
    "ada/notes.txt": "a" * 3000,
    "ada/deep/er.txt": "A" * 500,
    "bea.txt": "b" * 2000,
    "cy/lines.jsonl": "\n".join(json.dumps({"text": f"c{number}" * 60}) for number in range(40)),
}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for name, text in TEXTS.items():
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return prepare(tmp_path / "cache", CorpusOptions(source=str(tmp_path / "texts"), validation_percent=20.0)).path


def test_every_window_belongs_to_whom_its_middle_token_does(shards: Path) -> None:
    index = read_index(shards)
    found = owners.read(shards, index)
    assert found is not None
    assert sorted(found.names) == ["ada", "bea", "cy"]
    letters = {"a": "ada", "A": "ada", "b": "bea", "c": "cy"}
    for split in SPLITS:
        windows = Windows(shards, index, split, 16)
        owner_of_window = found.for_windows(index, split, 16)
        assert len(owner_of_window) == len(windows) > 0
        assert window_starts(index, split, 16).shape == owner_of_window.shape
        for row, owner in zip(windows[np.arange(len(windows))].tolist(), owner_of_window.tolist(), strict=True):
            if (middle := chr(row[8])) in letters:  # else the end of a document
                assert letters[middle] == found.names[owner]


def test_it_is_what_a_federation_divides_by(shards: Path) -> None:
    labels = language.labels(shards, context=16)
    assert labels.owners is not None
    assert labels.names == labels.owner_names
    assert set(labels.by_split["train"].tolist()) == {0, 1, 2}
    assert len(labels.by_split["train"]) == len(Windows(shards, read_index(shards), "train", 16))


def test_so_many_owners_are_no_labels(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "LABELS", 2)
    labels = language.labels(shards, context=16)
    assert labels.names == ("text",)
    assert not labels.by_split["train"].any()
    assert labels.owners is not None
    assert labels.owners["train"].any()


def test_older_shards_have_no_owners(shards: Path) -> None:
    """They go on working for whatever does not ask."""
    (shards / owners.FILE).unlink()
    labels = language.labels(shards, context=16)
    assert labels.owners is None
    assert not labels.by_split["train"].any()
    assert str(shards / owners.FILE) in labels.unowned
    assert "Create them again" in labels.unowned


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"train": [[0, 5]]}, "has owners of 5 tokens"),
        ({"train": [[99, 5]]}, "an owner without a name"),
        ({"train": [["a", 5]]}, "not a list of owners"),
        ({"version": 2}, "its format is not"),
    ],
)
def test_what_does_not_fit_the_shards_is_refused(shards: Path, change: dict[str, object], words: str) -> None:
    path = shards / owners.FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(DataError, match=words):
        owners.read(shards, read_index(shards))


def test_the_standard_library_is_divided_by_package() -> None:
    from training.corpus.documents import standard_library

    owner_of_file = {file.name: file.owner for file in standard_library().files}
    assert owner_of_file["ast.py"] == "ast"
    assert owner_of_file["asyncio/events.py"] == "asyncio"
    assert len(set(owner_of_file.values())) > 100
