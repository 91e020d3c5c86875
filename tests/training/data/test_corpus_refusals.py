"""Test that an error in a user's files is reported in one sentence, and leaves nothing behind."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.file_systems import small_file_system
from tests.training.data.texts import lines_of, numbered, prepared, relaxed, tokens_of
from training.corpus.errors import DataError
from training.corpus.shards import read_index


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": \n',
            r"^source: .*a.jsonl:2 is not JSON \(.*\). Correct or remove that line.",
        ),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "\xe9"}\n',
            r"^source: .*a.jsonl:2 is not UTF-8. Write the file as UTF-8",
        ),
        ("a.jsonl", b'\n\n{"body": "a", "id": 1}\n', r'^text_field: .*:3 has no text called "text": .*with body, id.'),
        ("a.jsonl", b'{"text": 3}\n', r'^text_field: .*:1 has no text called "text": that is 3. Correct or remove'),
        (
            "a.jsonl",
            b'{"text": null}\n',
            r'^text_field: .*:1 has no text called "text": that is null. Correct or remove',
        ),
        ("a.jsonl", b"[1]\n", r'^text_field: .*:1 has no text called "text": it is a list'),
        ("a.jsonl", b"[" * 100_000, r"^source: .*a.jsonl:1 is not JSON"),
        (
            "a.jsonl.gz",
            gzip.compress(b'{"text": "a"}\n', mtime=0)[:-9],
            r"^source: .*a.jsonl.gz is a damaged or unfinished .gz",
        ),
        ("a.txt.gz", b"no gz", r"^source: .*a.txt.gz is a damaged or unfinished .gz"),
        ("a.txt", b"caf\xe9", r"^source: .*a.txt is not UTF-8 \(byte 0xE9 at 3\). Convert it"),
        ("a.txt", b"", r"^source: .* contains no text: no file in it or below ends in .txt, .md, .jsonl, .ndjson."),
        ("a.dat", b"text", r"^source: .* contains no text: no file in it or below ends in .txt, .md, .jsonl, .ndjson."),
        ("a.txt", b" \n ", r"^source: mine contains no text: all 1 documents are blank"),
        ("a.txt", b"only this", r"^validation_percent: 5 % of mine leaves training or validation without data"),
    ],
)
def test_files_that_can_t_be_used(file: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / file).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        prepared(tmp_path / "cache", tmp_path / "mine")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob("*")), "nothing half-made is left"


def test_a_file_of_nothing_but_its_mark_holds_no_document(tmp_path: Path) -> None:
    """Windows' shell leaves such a file if nothing was written to it."""
    source = lines_of(tmp_path / "mine" / "b.jsonl", numbered()).parent
    created = prepared(tmp_path / "without", source)
    (source / "a.jsonl").write_bytes(b"\xef\xbb\xbf\r\n")
    assert tokens_of(prepared(tmp_path / "with", source).path, "train") == tokens_of(created.path, "train")


@relaxed
@given(st.binary(), st.sampled_from(["a.txt", "a.jsonl", "a.txt.gz", "a.jsonl.gz", "index.json"]), st.booleans())
@example(b'{"text": "\\udc00"}', "a.jsonl", False)
@example(b"[[[[", "index.json", False)
@example(b"[" * 100_000, "index.json", False)
@example(b"\xef\xbb\xbf", "a.txt", True)
def test_whatever_the_bytes_it_is_data_or_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str, packed: bool
) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    lines_of(folder / "b.jsonl", numbered(60))
    (folder / name).write_bytes(gzip.compress(content) if packed and name.endswith(".gz") else content)
    text = ""
    try:
        created = prepared(folder / "cache", folder, validation_percent=20.0)
        assert read_index(created.path).documents in (60, 61)
    except DataError as error:
        text = str(error)
    assert "\n" not in text
    assert not text or str(folder) in text


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^source: /nowhere does not exist. Name a path that the nodes can access."):
        prepared(tmp_path, Path("/nowhere"))
    with pytest.raises(
        DataError, match=r"^source: .*nn can't be read \(File name too long\). Name another, or correct it."
    ):
        prepared(tmp_path, Path("n" * 300))  # like a path that may not be read
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"^source: .*empty.txt is empty."):
        prepared(tmp_path / "cache", tmp_path / "empty.txt")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"^source: .*pipe is neither a file nor a folder."):
        prepared(tmp_path / "cache", tmp_path / "pipe")
    assert str(DataError("is bad.", "source").within("run.language")) == "run.language.source: is bad."


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path / "small", "256k") as folder:
        yield folder


def test_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    source = lines_of(tmp_path / "a.jsonl", numbered(20_000))
    with pytest.raises(
        DataError, match=r"^shards_folder: .*small has no space for the tokens \(No space left on device\). Free"
    ):
        prepared(small_disk, source)
    assert not list(small_disk.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(
        DataError, match=r"^shards_folder: .*file can't be written to \(Not a directory\). Name another"
    ):
        prepared(tmp_path / "file", source)
