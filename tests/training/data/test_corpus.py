"""Test turning texts into token shards: every document once, in any format, made once for all ranks."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tempfile
import threading
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.training.data.texts import documents_of, folder_of, lines_of, numbered, prepared, relaxed, tokens_of
from training.__main__ import main
from training.corpus import building, cache, documents
from training.corpus.building import ShardProgress, make_shards
from training.corpus.errors import DataError
from training.corpus.preparing import CorpusOptions, prepare
from training.corpus.shards import ShardIndex, read_index, verify
from training.corpus.tokenizer import ByteTokenizer, Tokens

texts = st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=30)


# What comes out.


@relaxed
@given(texts, st.booleans())
@example(["\ufeffa", "\x00", "\u2028", "\x85", "a\r\nb", "🐦" * 9, "e\u0301", "\u00e9"], True)
def test_wild_texts_survive_json(tmp_path_factory: pytest.TempPathFactory, contents: list[str], plain: bool) -> None:
    folder = tmp_path_factory.mktemp("wild")
    lines = (json.dumps({"text": text}, ensure_ascii=plain) for text in [*contents, *numbered(60)])
    (folder / "a.jsonl").write_bytes("\r\n".join(lines).encode())
    created = prepared(folder / "cache", folder / "a.jsonl", validation_percent=20.0)
    expected = {
        " ".join(unicodedata.normalize("NFC", text).split()): text for text in reversed([*contents, *numbered(60)])
    }
    assert documents_of(created.path) == Counter(text for normal, text in expected.items() if normal)


@pytest.mark.parametrize("kind", ["folder", "lines", "packed", "one file", "many lines"])
def test_every_document_is_there_once_whatever_it_came_in(kind: str, tmp_path: Path) -> None:
    contents, source = numbered(), tmp_path / "mine"
    if kind == "folder":
        folder_of(source, contents)
        (source / "picture.png").write_bytes(b"\x89PNG")
        (source / ".hidden.txt").write_text("not this")
    elif kind == "lines":
        source = lines_of(tmp_path / "mine.jsonl", contents)
    elif kind == "packed":
        source = tmp_path / "mine.jsonl.gz"
        source.write_bytes(gzip.compress(lines_of(tmp_path / "plain", contents).read_bytes()))
    elif kind == "one file":
        source = tmp_path / "book.text"
        source.write_text("\n".join(numbered(2000)))
    else:
        for number in range(4):
            lines_of(source / f"{number}" / "part.jsonl", contents[number::4])
    created = prepared(tmp_path / "cache", source)
    if kind == "one file":  # one document, which is divided between lines, and so has one end in each split
        lines = documents_of(created.path).elements()
        assert Counter(line for part in lines for line in part.split("\n") if line) == Counter(
            source.read_text().split("\n")
        )
        return
    assert documents_of(created.path) == Counter(contents)
    assert created.facts["documents"] == 200
    assert 0 < len(tokens_of(created.path, "validation")) < len(tokens_of(created.path, "train")) / 4
    assert verify(created.path).tokens == sum(len(text.encode()) + 1 for text in contents)


def test_endings_mean_the_same_in_any_case(tmp_path: Path) -> None:
    (tmp_path / "A.TXT").write_text("A text.\n")
    (tmp_path / "B.Jsonl").write_text('{"text": "A line."}\n')
    (tmp_path / "C.JSONL.GZ").write_bytes(gzip.compress(b'{"text": "A packed line."}\n'))
    (tmp_path / "d.pdf").write_text("none of them")
    found = documents.find(tmp_path, suffixes=(".Txt",), text_field="text")
    assert [text for text, *_ in found.documents()] == ["A text.\n", "A line.", "A packed line."]
    assert documents.find(tmp_path / "C.JSONL.GZ", suffixes=(), text_field="text").label == "C"


def test_folders_that_are_links_are_read_and_each_once(tmp_path: Path) -> None:
    folder_with_links, elsewhere = tmp_path / "mine", tmp_path / "elsewhere"
    for folder in (folder_with_links / "own", elsewhere / "deep"):
        folder.mkdir(parents=True)
        (folder / "a.txt").write_text("A text.\n")
    for link, target in {
        "linked": elsewhere,
        "again": elsewhere / "deep",
        "own/up": folder_with_links,
        "gone": "nowhere",
    }.items():
        (folder_with_links / link).symlink_to(target)
    found = documents.find(folder_with_links, suffixes=(".txt",), text_field="text")
    assert [file.name for file in found.files] == ["again/a.txt", "own/a.txt"]


@relaxed
@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(8, 64))
def test_a_text_longer_than_memory_is_cut_between_letters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, block: int
) -> None:
    monkeypatch.setattr(documents, "BLOCK_BYTES", block)
    (tmp_path / "a.txt").write_bytes(b"x" + text.encode())
    (found,) = [documents.find(tmp_path, suffixes=(".txt",), text_field="text")]
    read = list(found.documents())
    assert "".join(part for part, *_ in read) == "x" + text
    assert read[-1][1] == found.size


@relaxed
@given(st.text(alphabet="ab \n"), st.integers(1, 20))
def test_parts_make_up_the_text(text: str, letters: int) -> None:
    assert "".join(building._split_text(text, letters)) == text


def test_half_letters_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud800 half"}\n' + "".join(map(_as_line, numbered())))
    assert "? half" in documents_of(prepared(tmp_path / "cache", tmp_path / "a.jsonl").path)


def _as_line(text: str) -> str:
    return json.dumps({"text": text}) + "\n"


def test_documents_that_differ_only_in_blanks_and_composition_count_once(tmp_path: Path) -> None:
    again = ["Document 7. \r\n The  siskin sings at dawn, 7 times.\n", "e\u0301", "\u00e9 ", "  \n\t ", ""]
    created = prepared(tmp_path / "cache", lines_of(tmp_path / "a.jsonl", [*numbered(), *again]))
    index = read_index(created.path)
    assert (index.documents, index.duplicate_documents, index.empty) == (201, 2, 2)
    assert index.duplicate_bytes == len(again[0].encode()) + len(again[2].encode())


def test_validation_documents_stay_so_when_data_grows(tmp_path: Path) -> None:
    before = prepared(tmp_path / "cache", lines_of(tmp_path / "a.jsonl", numbered(300)))
    after = prepared(tmp_path / "cache", lines_of(tmp_path / "a.jsonl", ["a new one", *numbered(900)][::-1]))
    assert before.identity != after.identity
    stored = set(tokens_of(before.path, "validation").split(b"\xff"))
    assert stored <= set(tokens_of(after.path, "validation").split(b"\xff"))
    assert not stored & set(tokens_of(after.path, "train").split(b"\xff")) - {b""}


def test_a_few_pages_are_data_too(tmp_path: Path) -> None:
    pages = [f"Page {page}, line {line}: as it was seen from the window.\n" for page in range(3) for line in range(120)]
    folder = folder_of(tmp_path / "mine", ["".join(pages[start : start + 120]) for start in (0, 120, 240)])
    index = read_index(prepared(tmp_path / "cache", folder).path)
    assert all(sum(shard.tokens for shard in index.shards(split)) > 500 for split in ("train", "validation"))


@pytest.mark.parametrize("shard_bytes", [64, 1000, 2**20])
def test_shards_have_the_requested_length(shard_bytes: int, tmp_path: Path) -> None:
    source = documents.find(folder_of(tmp_path / "mine", numbered()), suffixes=(".txt",), text_field="text")
    index = make_shards(tmp_path, source, ByteTokenizer(), validation_percent=10.0, shard_bytes=shard_bytes)
    assert {shard.tokens for shard in index.train[:-1]} <= {shard_bytes}
    assert index == verify(tmp_path)


def test_progress_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "PROGRESS_SECONDS", 0.0)
    reports: list[str] = []

    def report(progress: ShardProgress | None) -> None:
        if progress is not None:
            assert 0 <= progress.bytes <= progress.total_bytes
            reports.append(str(progress))

    prepare(tmp_path / "cache", CorpusOptions(str(folder_of(tmp_path / "mine", numbered()))), on_progress=report)
    assert reports[-1].startswith("tokens of mine: 200 documents, 0 of 0 MB (100 %), ")


def test_progress_is_reported_while_a_single_text_takes_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the other ranks, and jobs that wait for the same tokens, would take who makes them for dead."""
    monkeypatch.setattr(building, "PROGRESS_SECONDS", 0.01)
    begun, event = threading.Event(), threading.Event()

    class Slow(ByteTokenizer):
        def encode(self, texts: list[str]) -> list[Tokens]:
            begun.set()
            assert event.wait(10), "nothing was reported meanwhile"
            return super().encode(texts)

    def report(progress: ShardProgress) -> None:
        if begun.is_set():
            event.set()

    source = documents.find(folder_of(tmp_path / "mine", numbered()), suffixes=(".txt",), text_field="text")
    index = make_shards(tmp_path, source, Slow(), validation_percent=10.0, on_progress=report)
    assert index.documents == 200


# What a run's data is called.


def test_the_same_data_is_made_once_and_other_data_is_called_otherwise(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "my texts", numbered())
    created = prepared(tmp_path / "cache", source)
    assert created.identity.startswith("my-texts+bytes+")
    before = read_index(created.path), (created.path / "index.json").stat().st_mtime_ns
    assert prepared(tmp_path / "cache", source) == created
    assert before == (read_index(created.path), (created.path / "index.json").stat().st_mtime_ns)
    assert prepared(tmp_path / "cache", source, validation_percent=9.0).identity != created.identity
    (source / "part-0" / "0.txt").write_text("something else")
    assert prepared(tmp_path / "cache", source).identity != created.identity
    assert prepare(tmp_path / "cache", CorpusOptions(str(source)), created.identity).path == created.path


def test_a_checkpoint_s_data_that_is_gone_is_named(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "mine", numbered())
    with pytest.raises(
        DataError, match=r"^source: this run was trained on mine\+bytes\+0123456789, which is no longer in"
    ):
        prepare(tmp_path / "cache", CorpusOptions(str(source)), "mine+bytes+0123456789")


def test_a_damaged_cache_is_rebuilt(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "mine", numbered())
    created = prepared(tmp_path / "cache", source)
    shard = next(created.path.glob("train-*.bin"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    assert prepared(tmp_path / "cache", source) == created
    assert shard.read_bytes() == content
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [created.identity]


def test_what_is_somebody_else_s_is_no_damage() -> None:
    """Jobs of two people who share a folder for tokens, but no group."""
    with tempfile.TemporaryDirectory() as root:
        shared = Path(root) / "cache"
        source = lines_of(Path(root) / "a.jsonl", numbered())
        created = prepared(shared, source)
        for path, mode in ((Path(root), 0o755), (shared, 0o777), (created.path / "index.json", 0)):
            path.chmod(mode)
        with (
            somebody_else(),
            pytest.raises(
                DataError, match=r"^shards_folder: .*a\+bytes\+\w+ belongs to another user and cannot be read"
            ),
        ):
            prepared(shared, source)
        assert [path.name for path in shared.iterdir()] == [created.identity]
        (created.path / "index.json").chmod(0o644)
        with somebody_else():
            assert prepared(shared, source) == created


@contextmanager
def somebody_else() -> Iterator[None]:
    """Run as another user than root, where tests run as root."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(12345)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


def test_others_wait_for_who_is_making_it(tmp_path: Path) -> None:
    index = ShardIndex(ByteTokenizer().id, "uint8", train=[], validation=[])
    begun, go_on, created, reports = threading.Event(), threading.Event(), [], []

    def make(staging: Path, touch: object) -> None:
        created.append(staging)
        begun.set()
        go_on.wait(10)
        index.write(staging)

    def on_wait() -> None:
        reports.append(1)
        go_on.set()

    first = threading.Thread(target=cache.ensure, args=(tmp_path / "x", make, lambda: None))
    first.start()
    begun.wait(10)
    cache.ensure(tmp_path / "x", make, on_wait)
    first.join(10)
    assert read_index(tmp_path / "x") == index
    assert (len(created), bool(reports)) == (1, True)


def test_an_abandoned_staging_folder_of_another_machine_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / ".x.abcdef01.1.00000000").mkdir()  # of another machine
    os.utime(tmp_path / ".x.abcdef01.1.00000000", (0, 0))
    index = ShardIndex(ByteTokenizer().id, "uint8", train=[], validation=[])
    cache.ensure(tmp_path / "x", lambda staging, touch: index.write(staging), lambda: None)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_maker_that_was_stopped_for_too_long_begins_again(tmp_path: Path) -> None:
    index = ShardIndex(ByteTokenizer().id, "uint8", train=[], validation=[])
    created: list[Path] = []

    def make(staging: Path, touch: Callable[[], None]) -> None:
        created.append(staging)
        if len(created) == 1:
            staging.rmdir()  # by somebody who took us for dead
            touch()
        index.write(staging)

    cache.ensure(tmp_path / "x", make, lambda: None)
    assert read_index(tmp_path / "x") == index
    assert len(created) == 2


def test_a_maker_that_died_leaves_nothing(tmp_path: Path) -> None:
    source = folder_of(tmp_path / "mine", numbered())
    identity = prepared(tmp_path / "cache", source).identity
    for path in (tmp_path / "cache" / identity).iterdir():
        path.unlink()
    (tmp_path / "cache" / identity).rmdir()
    script = (
        "import os, sys\nfrom training.corpus import building\nfrom training.corpus.preparing import *\n"
        "building.ShardIndex.write = lambda *a: os.kill(os.getpid(), 9)\n"
        "prepare(Path(sys.argv[1]), CorpusOptions(sys.argv[2]))"
    )
    killed = subprocess.run([sys.executable, "-c", script, tmp_path / "cache", source], check=False)
    assert killed.returncode == -9
    (left,) = (tmp_path / "cache").iterdir()
    assert left.name.startswith(f".{identity}.")
    assert prepared(tmp_path / "cache", source).identity == identity
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [identity]


def test_preparing_where_nothing_can_be_created_next_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("VIGIL_CACHE")
    run, source = tmp_path / "run.toml", folder_of(tmp_path / "mine", numbered())
    (tmp_path / "runs").touch()
    run.write_text(f'[run.language]\nsource = "{source}"\nshards_folder = "{tmp_path / "scratch"}"\n')
    assert main(["prepare", str(run)]) == 0
    run.write_text(f'[run.language]\nsource = "{source}"\n')
    assert main(["prepare", str(run)]) == 1
    output = capsys.readouterr().err
    assert output.startswith("run.language.shards_folder: ")
    assert output.endswith("can't be written to (Not a directory). Name another folder.\n")


def test_preparing_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, source = tmp_path / "run.toml", folder_of(tmp_path / "mine", numbered())
    options = {"source": str(source), "shards_folder": str(tmp_path / "scratch")}
    run.write_text("[run.language]\n" + "".join(f'{name} = "{value}"\n' for name, value in options.items()))
    assert main(["prepare", str(run)]) == 0
    path = prepare(tmp_path / "scratch", CorpusOptions(str(source))).path
    assert capsys.readouterr().out.startswith(f"{path}: tokenizer bytes, vocabulary 256, documents 200, ")
    run.write_text('[run.language]\nsource = "/nowhere"\n')
    assert main(["prepare", str(run)]) == 1
    run.write_text('[run.language]\nsource = "nowhere"\n')
    assert main(["prepare", str(run)]) == 2
    output = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[0] for line in output] == ["run.language.source"] * 2
