"""Test token shards made elsewhere, and tokens of other tokenizers: which are accepted, and which refused."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.data.texts import folder_of, lines_of, numbered, prepared, tokens_of
from tests.training.tokenizers import stand_in, write_tokenizer
from training.__main__ import main
from training.corpus.errors import DataError
from training.corpus.preparing import CorpusOptions, prepare
from training.corpus.shards import ShardIndex, read_index, verify
from training.corpus.tokenizer import ByteTokenizer

# Shards made elsewhere.


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Write shards of 16 bits, as another program might."""
    folder = tmp_path / "shards"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name, tokens in (("a.bin", 1000), ("b.bin", 300)):
        rng.integers(0, 5000, tokens, dtype="<u2").tofile(folder / name)
    about = {
        "format": "vigil-tokens",
        "version": 1,
        "dtype": "uint16",
        "tokenizer": {"name": "theirs", "sha256": "ab" * 32, "vocabulary": 5000, "end_of_document": 0},
        "train": [{"file": "a.bin", "tokens": 1000}],
        "validation": [{"file": "b.bin", "tokens": 300}],
    }
    (folder / "index.json").write_text(json.dumps(about))
    return folder


def _change(folder: Path, **changes: Any) -> None:
    about = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps({**about, **changes}))


def test_ready_made_shards_are_read_where_they_lie(shards: Path, tmp_path: Path) -> None:
    created = prepared(tmp_path / "cache", shards)
    assert created.path == shards
    assert created.identity.startswith("shards+theirs-abababab+")
    assert created.vocabulary == 5000
    assert created.facts["tokens"] == 1300
    assert prepare(tmp_path / "cache", CorpusOptions(str(shards)), created.identity) == created
    _change(shards, documents=4)
    with pytest.raises(
        DataError, match=r"this run was trained on shards\+theirs-abababab\+\w+, which is not what is in"
    ):
        prepare(tmp_path / "cache", CorpusOptions(str(shards)), created.identity)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "x"}, 'its format is not "vigil-tokens", version 1'),
        ({"dtype": "int64"}, "its dtype 'int64' is none of uint8, uint16, uint32"),
        ({"dtype": "uint8"}, "a vocabulary of 5000 does not fit uint8"),
        ({"train": [{"file": "../a.bin", "tokens": 1}]}, "'../a.bin' is not a file in the same folder"),
        ({"train": [{"file": "a.bin", "tokens": -1}]}, "tokens is -1, not a count"),
        ({"train": [{"tokens": 1}]}, "file is missing"),
        ({"train": [{"file": "a\0.bin", "tokens": 1}]}, "is not a file in the same folder"),
        ({"train": [{"file": "\ud800.bin", "tokens": 1}]}, "is not a file in the same folder"),
        ({"documents": float("inf")}, "does not describe token shards"),
        ({"train": 3}, "does not describe token shards"),
        ({"tokenizer": None}, "does not describe token shards"),
        (
            {"train": [{"file": "a.bin", "tokens": 1001}]},
            "a.bin ends early: 2,000 bytes instead of 2,002. Copy it again.",
        ),
        ({"train": [{"file": "a.bin", "tokens": 900}]}, "a.bin is longer than it was: 2,000 bytes instead of 1,800"),
        ({"train": [{"file": "c.bin", "tokens": 900}]}, r"c.bin can't be read \(No such file or directory\)"),
    ],
)
def test_shards_that_differ_from_their_index(shards: Path, tmp_path: Path, changes: Any, message: str) -> None:
    _change(shards, **changes)
    with pytest.raises(DataError, match=f"^source: .*{message}"):
        prepared(tmp_path / "cache", shards)


def test_an_index_that_is_no_json(shards: Path, tmp_path: Path) -> None:
    (shards / "index.json").write_text("{")
    with pytest.raises(DataError, match=r"index.json is not JSON \(.*\). Create the shards again."):
        prepared(tmp_path / "cache", shards)


def test_verifying_finds_a_changed_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = prepared(tmp_path / "cache", folder_of(tmp_path / "mine", numbered())).path
    shard = next(path.glob("train-*.bin"))
    content = shard.read_bytes()
    shard.write_bytes(b"\x00" + content[1:])
    read_index(path)
    with pytest.raises(DataError, match="train-00000.bin is damaged: its sha256 differs"):
        verify(path)
    assert main(["verify", str(path)]) == 1
    shard.write_bytes(content)
    assert main(["verify", str(path)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{path}: verified, 9,980 tokens, 2 shards, 9,980 bytes\n"
    assert err == f"{shard} is damaged: its sha256 differs. Create it again.\n"
    assert main(["verify", "n" * 300]) == 1
    assert capsys.readouterr().err.endswith("n can't be read: File name too long\n")


# Tokenizers.


@pytest.fixture(params=["real", "stand-in"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "real":
        pytest.importorskip("tokenizers")
    else:
        monkeypatch.setitem(sys.modules, "tokenizers", stand_in())


@pytest.mark.usefixtures("library")
def test_a_tokenizer_of_hugging_face(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "birds" / "tokenizer.json")
    contents = [*numbered(), "the siskin </s> sings"]
    created = prepared(tmp_path / "cache", lines_of(tmp_path / "a.jsonl", contents), tokenizer=str(path))
    index = read_index(created.path)
    assert created.identity.split("+")[1] == f"birds-{index.tokenizer.sha256[:8]}"
    assert (index.tokenizer.vocabulary, index.tokenizer.end_of_document, index.dtype) == (7, 6, "uint8")
    tokens = tokens_of(created.path, "train") + tokens_of(created.path, "validation")
    assert tokens.count(6) == len(contents), "`</s>` in a text is no end of a document"
    found = Counter(tokens.split(b"\x06"))
    assert found[bytes([0, 0, 0, 0, 2, 3, 4, 5, 0, 0, 0, 0])] == 200, "whole documents, whatever the file's truncation"
    assert found[bytes([1, 2, 0, 0, 0, 3])] == 1
    assert prepare(tmp_path / "cache", CorpusOptions(str(tmp_path / "a.jsonl"), str(path)), created.identity) == created


@pytest.mark.usefixtures("library")
def test_a_tokenizer_without_an_end_gets_an_end_and_a_large_vocabulary_wider_tokens(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "wide.json", *(f"w{number}" for number in range(300)), end="")
    created = prepared(tmp_path / "cache", folder_of(tmp_path / "mine", numbered()), tokenizer=str(path))
    index = read_index(created.path)
    assert (index.tokenizer.name, index.tokenizer.vocabulary, index.tokenizer.end_of_document) == ("wide", 302, 301)
    assert index.dtype == "uint16"
    assert np.fromfile(created.path / index.train[0].file, "<u2").max() == 301


@pytest.mark.usefixtures("library")
def test_another_tokenizer_than_the_checkpoint_s_is_refused(tmp_path: Path, shards: Path) -> None:
    path = write_tokenizer(tmp_path / "birds.json")
    source = folder_of(tmp_path / "mine", numbered())
    created = prepared(tmp_path / "cache", source, tokenizer=str(path))
    write_tokenizer(path, "an", "other")
    wanted = CorpusOptions(str(source), str(path))
    assert prepare(tmp_path / "cache", wanted, created.identity) == created, "its tokens are still there"
    with pytest.raises(DataError, match=r"^tokenizer: is birds-\w{8} now, but this run's tokens were made with birds-"):
        prepare(tmp_path / "elsewhere", wanted, created.identity)
    with pytest.raises(DataError, match=r"^tokenizer: is birds-\w{8}, but the shards in .* made with theirs-abababab"):
        prepared(tmp_path / "cache", shards, tokenizer=str(path))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("content", ["{}", "no JSON", "\xff"])
def test_what_is_no_tokenizer(content: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=r"^tokenizer: .*t.json is not a tokenizer.json that tokenizers .* can read"):
        prepared(tmp_path / "cache", folder_of(tmp_path / "mine", ["a"]), tokenizer=str(tmp_path / "t.json"))


def test_a_tokenizer_that_has_no_token_for_a_word(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path = write_tokenizer(tmp_path / "t.json")
    path.write_text(path.read_text().replace('"unk_token": "<unk>"', '"unk_token": "<none>"'))
    with pytest.raises(
        DataError, match=r"^tokenizer: .*t.json fails on a text \(.*Missing \[UNK\] token.*\). Correct it"
    ):
        prepared(tmp_path / "cache", folder_of(tmp_path / "mine", numbered()), tokenizer=str(path))
    assert not list((tmp_path / "cache").iterdir())


def test_without_the_library_the_error_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    path = write_tokenizer(tmp_path / "t.json")
    with pytest.raises(DataError, match=r"^tokenizer: needs the library `tokenizers`, .* \(pip install tokenizers\)"):
        prepared(tmp_path / "cache", folder_of(tmp_path / "mine", ["a"]), tokenizer=str(path))
    with pytest.raises(DataError, match=r"^tokenizer: /nowhere/t.json can't be read \(No such file or directory\)"):
        prepared(tmp_path / "cache", folder_of(tmp_path / "mine", ["a"]), tokenizer="/nowhere/t.json")


def test_an_index_remembers(tmp_path: Path) -> None:
    index = ShardIndex(
        ByteTokenizer().id, "uint8", train=[], validation=[], documents=3, duplicate_documents=2, empty=1
    )
    index.write(tmp_path)
    assert read_index(tmp_path) == index
