"""Texts become token shards: every document once, by anybody's files, or a sentence that says why not."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
import unicodedata
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.training.tokenizers import stand_in, write_tokenizer
from training.__main__ import main
from training.corpus import cache, documents, making
from training.corpus.errors import DataError
from training.corpus.making import Progress, make_shards
from training.corpus.preparing import Wanted, prepare
from training.corpus.shards import Index, read_index, verify
from training.corpus.tokenizer import END_OF_BYTES, Bytes
from training.data import Prepared

relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
texts = st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=30)


def _numbered(count: int = 200) -> list[str]:
    return [f"Document {number}.\nThe siskin sings at dawn, {number} times." for number in range(count)]


def _folder(path: Path, contents: list[str]) -> Path:
    for number, text in enumerate(contents):
        file = path / f"part-{number % 3}" / f"{number}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())
    return path


def _lines(path: Path, contents: list[str], field: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n" for text in contents))
    return path


def _read(made: Path, split: str) -> bytes:
    index = read_index(made)
    return b"".join((made / shard.file).read_bytes() for shard in getattr(index, split))


def _documents(made: Path) -> Counter[str]:
    found = [part for split in ("train", "validation") for part in _read(made, split).split(bytes([END_OF_BYTES]))[:-1]]
    return Counter(part.decode() for part in found)


def _prepare(cache: Path, source: Path, **options: Any) -> Prepared:
    return prepare(cache, Wanted(str(source), **options))


# What comes out.


@pytest.mark.parametrize("kind", ["folder", "lines", "packed", "one file", "many lines"])
def test_every_document_is_there_once_whatever_it_came_in(kind: str, tmp_path: Path) -> None:
    contents, source = _numbered(), tmp_path / "mine"
    if kind == "folder":
        _folder(source, contents)
        (source / "picture.png").write_bytes(b"\x89PNG")
        (source / ".hidden.txt").write_text("not this")
    elif kind == "lines":
        source = _lines(tmp_path / "mine.jsonl", contents)
    elif kind == "packed":
        source = tmp_path / "mine.jsonl.gz"
        source.write_bytes(gzip.compress(_lines(tmp_path / "plain", contents).read_bytes()))
    elif kind == "one file":
        source = tmp_path / "book.text"
        source.write_text("\n".join(_numbered(2000)))
    else:
        for number in range(4):
            _lines(source / f"{number}" / "part.jsonl", contents[number::4])
    made = _prepare(tmp_path / "cache", source)
    if kind == "one file":  # one document, which is divided between lines, and so has one end in each split
        lines = _documents(made.path).elements()
        assert Counter(line for part in lines for line in part.split("\n") if line) == Counter(
            source.read_text().split("\n")
        )
        return
    assert _documents(made.path) == Counter(contents)
    assert made.facts["documents"] == 200
    assert 0 < len(_read(made.path, "validation")) < len(_read(made.path, "train")) / 4
    assert verify(made.path).tokens == sum(len(text.encode()) + 1 for text in contents)


@relaxed
@given(texts, st.booleans())
@example(["\ufeffa", "\x00", "\u2028", "\x85", "a\r\nb", "🐦" * 9, "e\u0301", "\u00e9"], True)
def test_wild_texts_survive_json(tmp_path_factory: pytest.TempPathFactory, contents: list[str], plain: bool) -> None:
    folder = tmp_path_factory.mktemp("wild")
    lines = (json.dumps({"text": text}, ensure_ascii=plain) for text in [*contents, *_numbered(60)])
    (folder / "a.jsonl").write_bytes("\r\n".join(lines).encode())
    made = _prepare(folder / "cache", folder / "a.jsonl", validation_percent=20.0)
    expected = {
        " ".join(unicodedata.normalize("NFC", text).split()): text for text in reversed([*contents, *_numbered(60)])
    }
    assert _documents(made.path) == Counter(text for normal, text in expected.items() if normal)


@relaxed
@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(8, 64))
def test_a_text_longer_than_memory_is_cut_between_letters(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, block: int
) -> None:
    monkeypatch.setattr(documents, "BLOCK_BYTES", block)
    (tmp_path / "a.txt").write_bytes(b"x" + text.encode())
    (found,) = [documents.find(tmp_path, suffixes=(".txt",), text_field="text")]
    read = list(found.documents())
    assert "".join(part for part, _ in read) == "x" + text
    assert read[-1][1] == found.size


@relaxed
@given(st.text(alphabet="ab \n"), st.integers(1, 20))
def test_parts_make_up_the_text(text: str, letters: int) -> None:
    assert "".join(making._cut(text, letters)) == text


def test_half_letters_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud800 half"}\n' + "".join(map(_as_line, _numbered())))
    assert "? half" in _documents(_prepare(tmp_path / "cache", tmp_path / "a.jsonl").path)


def _as_line(text: str) -> str:
    return json.dumps({"text": text}) + "\n"


def test_documents_that_differ_only_in_blanks_and_composition_count_once(tmp_path: Path) -> None:
    again = ["Document 7. \r\n The  siskin sings at dawn, 7 times.\n", "e\u0301", "\u00e9 ", "  \n\t ", ""]
    made = _prepare(tmp_path / "cache", _lines(tmp_path / "a.jsonl", [*_numbered(), *again]))
    index = read_index(made.path)
    assert (index.documents, index.duplicate_documents, index.empty) == (201, 2, 2)
    assert index.duplicate_bytes == len(again[0].encode()) + len(again[2].encode())


def test_what_is_kept_for_validation_stays_so_when_data_grows(tmp_path: Path) -> None:
    before = _prepare(tmp_path / "cache", _lines(tmp_path / "a.jsonl", _numbered(300)))
    after = _prepare(tmp_path / "cache", _lines(tmp_path / "a.jsonl", ["a new one", *_numbered(900)][::-1]))
    assert before.identity != after.identity
    kept = set(_read(before.path, "validation").split(b"\xff"))
    assert kept <= set(_read(after.path, "validation").split(b"\xff"))
    assert not kept & set(_read(after.path, "train").split(b"\xff")) - {b""}


@pytest.mark.parametrize("shard_bytes", [64, 1000, 2**20])
def test_shards_are_as_long_as_asked_for(shard_bytes: int, tmp_path: Path) -> None:
    source = documents.find(_folder(tmp_path / "mine", _numbered()), suffixes=(".txt",), text_field="text")
    index = make_shards(tmp_path, source, Bytes(), validation_percent=10.0, shard_bytes=shard_bytes)
    assert {shard.tokens for shard in index.train[:-1]} <= {shard_bytes}
    assert index == verify(tmp_path)


def test_progress_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(making, "TELL_SECONDS", 0.0)
    told: list[str] = []

    def tell(progress: Progress | None) -> None:
        if progress is not None:
            assert 0 <= progress.bytes <= progress.total_bytes
            told.append(str(progress))

    prepare(tmp_path / "cache", Wanted(str(_folder(tmp_path / "mine", _numbered()))), tell=tell)
    assert told[-1].startswith("tokens of mine: 200 documents, 0 of 0 MB (100 %), ")


# What a run's data is called.


def test_the_same_data_is_made_once_and_other_data_is_called_otherwise(tmp_path: Path) -> None:
    source = _folder(tmp_path / "my texts", _numbered())
    made = _prepare(tmp_path / "cache", source)
    assert made.identity.startswith("my-texts+bytes+")
    before = read_index(made.path), (made.path / "index.json").stat().st_mtime_ns
    assert _prepare(tmp_path / "cache", source) == made
    assert before == (read_index(made.path), (made.path / "index.json").stat().st_mtime_ns)
    assert _prepare(tmp_path / "cache", source, validation_percent=9.0).identity != made.identity
    (source / "part-0" / "0.txt").write_text("something else")
    assert _prepare(tmp_path / "cache", source).identity != made.identity
    assert prepare(tmp_path / "cache", Wanted(str(source)), made.identity).path == made.path


def test_a_checkpoint_s_data_that_is_gone_is_named(tmp_path: Path) -> None:
    source = _folder(tmp_path / "mine", _numbered())
    with pytest.raises(DataError, match=r"^source: this run was trained on mine\+bytes\+0123456789, which is not in"):
        prepare(tmp_path / "cache", Wanted(str(source)), "mine+bytes+0123456789")


def test_a_cache_that_was_damaged_is_made_anew(tmp_path: Path) -> None:
    source = _folder(tmp_path / "mine", _numbered())
    made = _prepare(tmp_path / "cache", source)
    shard = next(made.path.glob("train-*.bin"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    assert _prepare(tmp_path / "cache", source) == made
    assert shard.read_bytes() == content
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [made.identity]


def test_others_wait_for_who_is_making_it(tmp_path: Path) -> None:
    index = Index(Bytes().id, "uint8", train=[], validation=[])
    begun, go_on, made, told = threading.Event(), threading.Event(), [], []

    def make(staging: Path, touch: object) -> None:
        made.append(staging)
        begun.set()
        go_on.wait(10)
        index.write(staging)

    def tell() -> None:
        told.append(1)
        go_on.set()

    first = threading.Thread(target=cache.keep, args=(tmp_path / "x", make, lambda: None))
    first.start()
    begun.wait(10)
    cache.keep(tmp_path / "x", make, tell)
    first.join(10)
    assert read_index(tmp_path / "x") == index
    assert (len(made), bool(told)) == (1, True)


def test_a_maker_that_nobody_has_heard_of_is_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / ".x.abcdef01.1.00000000").mkdir()  # of another machine
    os.utime(tmp_path / ".x.abcdef01.1.00000000", (0, 0))
    index = Index(Bytes().id, "uint8", train=[], validation=[])
    cache.keep(tmp_path / "x", lambda staging, touch: index.write(staging), lambda: None)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_maker_that_died_leaves_nothing(tmp_path: Path) -> None:
    source = _folder(tmp_path / "mine", _numbered())
    identity = _prepare(tmp_path / "cache", source).identity
    for path in (tmp_path / "cache" / identity).iterdir():
        path.unlink()
    (tmp_path / "cache" / identity).rmdir()
    script = (
        "import os, sys\nfrom training.corpus import making\nfrom training.corpus.preparing import *\n"
        "making.Index.write = lambda *a: os.kill(os.getpid(), 9)\nprepare(Path(sys.argv[1]), Wanted(sys.argv[2]))"
    )
    killed = subprocess.run([sys.executable, "-c", script, tmp_path / "cache", source], check=False)
    assert killed.returncode == -9
    (left,) = (tmp_path / "cache").iterdir()
    assert left.name.startswith(f".{identity}.")
    assert _prepare(tmp_path / "cache", source).identity == identity
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [identity]


# Shards made elsewhere.


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Of 16 bits, as another program might write them."""
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
    made = _prepare(tmp_path / "cache", shards)
    assert made.path == shards
    assert made.identity.startswith("shards+theirs-abababab+")
    assert made.vocabulary == 5000
    assert made.facts["tokens"] == 1300
    assert prepare(tmp_path / "cache", Wanted(str(shards)), made.identity) == made
    _change(shards, documents=4)
    with pytest.raises(
        DataError, match=r"this run was trained on shards\+theirs-abababab\+\w+, which is not what lies"
    ):
        prepare(tmp_path / "cache", Wanted(str(shards)), made.identity)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "x"}, 'its format is not "vigil-tokens", version 1'),
        ({"dtype": "int64"}, "its dtype 'int64' is none of uint8, uint16, uint32"),
        ({"dtype": "uint8"}, "a vocabulary of 5000 does not fit uint8"),
        ({"train": [{"file": "../a.bin", "tokens": 1}]}, "'../a.bin' is no file beside it"),
        ({"train": [{"file": "a.bin", "tokens": -1}]}, "tokens is -1, not a count"),
        ({"train": [{"tokens": 1}]}, "file is missing"),
        ({"train": 3}, "does not describe token shards"),
        ({"tokenizer": None}, "does not describe token shards"),
        (
            {"train": [{"file": "a.bin", "tokens": 1001}]},
            "a.bin ends early: 2,000 bytes instead of 2,002. Copy it anew.",
        ),
        ({"train": [{"file": "a.bin", "tokens": 900}]}, "a.bin is longer than it was: 2,000 bytes instead of 1,800"),
        ({"train": [{"file": "c.bin", "tokens": 900}]}, r"c.bin can't be read \(No such file or directory\)"),
    ],
)
def test_shards_that_are_not_what_they_say(shards: Path, tmp_path: Path, changes: Any, message: str) -> None:
    _change(shards, **changes)
    with pytest.raises(DataError, match=f"^source: .*{message}"):
        _prepare(tmp_path / "cache", shards)


def test_an_index_that_is_no_json(shards: Path, tmp_path: Path) -> None:
    (shards / "index.json").write_text("{")
    with pytest.raises(DataError, match=r"index.json is not JSON \(.*\). Make the shards anew."):
        _prepare(tmp_path / "cache", shards)


def test_verifying_finds_a_changed_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = _prepare(tmp_path / "cache", _folder(tmp_path / "mine", _numbered())).path
    shard = next(made.glob("train-*.bin"))
    content = shard.read_bytes()
    shard.write_bytes(b"\x00" + content[1:])
    read_index(made)
    with pytest.raises(DataError, match="train-00000.bin is damaged: its sha256 is another"):
        verify(made)
    assert main(["verify", str(made)]) == 1
    shard.write_bytes(content)
    assert main(["verify", str(made)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{made}: verified, 9,980 tokens, 2 shards, 9,980 bytes\n"
    assert err == f"{shard} is damaged: its sha256 is another. Make it anew.\n"


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
    contents = [*_numbered(), "the siskin </s> sings"]
    made = _prepare(tmp_path / "cache", _lines(tmp_path / "a.jsonl", contents), tokenizer=str(path))
    index = read_index(made.path)
    assert made.identity.split("+")[1] == f"birds-{index.tokenizer.sha256[:8]}"
    assert (index.tokenizer.vocabulary, index.tokenizer.end_of_document, index.dtype) == (7, 6, "uint8")
    tokens = _read(made.path, "train") + _read(made.path, "validation")
    assert tokens.count(6) == len(contents), "`</s>` in a text is no end of a document"
    found = Counter(tokens.split(b"\x06"))
    assert found[bytes([0, 0, 0, 0, 2, 3, 4, 5, 0, 0, 0, 0])] == 200, "whole documents, whatever the file's truncation"
    assert found[bytes([1, 2, 0, 0, 0, 3])] == 1
    assert prepare(tmp_path / "cache", Wanted(str(tmp_path / "a.jsonl"), str(path)), made.identity) == made


@pytest.mark.usefixtures("library")
def test_a_tokenizer_without_an_end_gets_one_and_many_words_wider_tokens(tmp_path: Path) -> None:
    path = write_tokenizer(tmp_path / "wide.json", *(f"w{number}" for number in range(300)), end="")
    made = _prepare(tmp_path / "cache", _folder(tmp_path / "mine", _numbered()), tokenizer=str(path))
    index = read_index(made.path)
    assert (index.tokenizer.name, index.tokenizer.vocabulary, index.tokenizer.end_of_document) == ("wide", 302, 301)
    assert index.dtype == "uint16"
    assert np.fromfile(made.path / index.train[0].file, "<u2").max() == 301


@pytest.mark.usefixtures("library")
def test_another_tokenizer_than_the_checkpoint_s_is_refused(tmp_path: Path, shards: Path) -> None:
    path = write_tokenizer(tmp_path / "birds.json")
    source = _folder(tmp_path / "mine", _numbered())
    made = _prepare(tmp_path / "cache", source, tokenizer=str(path))
    write_tokenizer(path, "an", "other")
    wanted = Wanted(str(source), str(path))
    assert prepare(tmp_path / "cache", wanted, made.identity) == made, "its tokens are still there"
    with pytest.raises(DataError, match=r"^tokenizer: is birds-\w{8} now, but this run's tokens were made with birds-"):
        prepare(tmp_path / "elsewhere", wanted, made.identity)
    with pytest.raises(DataError, match=r"^tokenizer: is birds-\w{8}, but the shards in .* made with theirs-abababab"):
        _prepare(tmp_path / "cache", shards, tokenizer=str(path))


@pytest.mark.usefixtures("library")
@pytest.mark.parametrize("content", ["{}", "no JSON", "\xff"])
def test_what_is_no_tokenizer(content: str, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text(content, encoding="latin-1")
    with pytest.raises(DataError, match=r"^tokenizer: .*t.json is no tokenizer.json that tokenizers .* can read"):
        _prepare(tmp_path / "cache", _folder(tmp_path / "mine", ["a"]), tokenizer=str(tmp_path / "t.json"))


def test_without_the_library_a_sentence_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    path = write_tokenizer(tmp_path / "t.json")
    with pytest.raises(DataError, match=r"^tokenizer: needs the library `tokenizers`, .* \(pip install tokenizers\)"):
        _prepare(tmp_path / "cache", _folder(tmp_path / "mine", ["a"]), tokenizer=str(path))
    with pytest.raises(DataError, match=r"^tokenizer: /nowhere/t.json can't be read \(No such file or directory\)"):
        _prepare(tmp_path / "cache", _folder(tmp_path / "mine", ["a"]), tokenizer="/nowhere/t.json")


def test_preparing_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, source = tmp_path / "run.toml", _folder(tmp_path / "mine", _numbered())
    options = {"source": str(source), "shards_folder": str(tmp_path / "scratch")}
    run.write_text("[run.language]\n" + "".join(f'{name} = "{value}"\n' for name, value in options.items()))
    assert main(["prepare", str(run)]) == 0
    made = prepare(tmp_path / "scratch", Wanted(str(source))).path
    assert capsys.readouterr().out.startswith(f"{made}: tokenizer bytes, vocabulary 256, documents 200, ")
    run.write_text('[run.language]\nsource = "/nowhere"\n')
    assert main(["prepare", str(run)]) == 1
    run.write_text('[run.language]\nsource = "nowhere"\n')
    assert main(["prepare", str(run)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[0] for line in said] == ["run.language.source"] * 2


# What is wrong with somebody's files.


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": \n',
            r"^source: .*a.jsonl:2 is not JSON \(.*\). Mend or remove that line.",
        ),
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "\xe9"}\n',
            r"^source: .*a.jsonl:2 is not UTF-8. Write the file as UTF-8",
        ),
        ("a.jsonl", b'\n\n{"body": "a", "id": 1}\n', r'^text_field: .*:3 has no text called "text": .*with body, id.'),
        ("a.jsonl", b'{"text": 3}\n', r'^text_field: .*:1 has no text called "text": it is an object with text'),
        ("a.jsonl", b"[1]\n", r'^text_field: .*:1 has no text called "text": it is a list'),
        ("a.jsonl", b"[" * 100_000, r"^source: .*a.jsonl:1 is not JSON"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n')[:-9], r"^source: .*a.jsonl.gz is a damaged or unfinished .gz"),
        ("a.txt.gz", b"no gz", r"^source: .*a.txt.gz is a damaged or unfinished .gz"),
        ("a.txt", b"caf\xe9", r"^source: .*a.txt is not UTF-8 \(byte 0xE9 at 3\). Convert it"),
        ("a.txt", b"", r"^source: .* holds no text: no file in it, or below, ends in .txt, .md, .jsonl, .ndjson."),
        ("a.dat", b"text", r"^source: .* holds no text: no file in it, or below, ends in .txt, .md, .jsonl, .ndjson."),
        ("a.txt", b" \n ", r"^source: mine has no text in it: all 1 documents are blank"),
        ("a.txt", b"only this", r"^validation_percent: 5 % of mine leaves nothing for one of training and validation"),
    ],
)
def test_files_that_can_t_be_used(file: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / file).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        _prepare(tmp_path / "cache", tmp_path / "mine")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").glob("*")), "nothing half-made is left"


@relaxed
@given(st.binary(), st.sampled_from(["a.txt", "a.jsonl", "a.txt.gz", "a.jsonl.gz", "index.json"]), st.booleans())
@example(b'{"text": "\\udc00"}', "a.jsonl", False)
@example(b"[[[[", "index.json", False)
@example(b"\xef\xbb\xbf", "a.txt", True)
def test_whatever_the_bytes_it_is_data_or_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, name: str, packed: bool
) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    _lines(folder / "b.jsonl", _numbered(60))
    (folder / name).write_bytes(gzip.compress(content) if packed and name.endswith(".gz") else content)
    said = ""
    try:
        made = _prepare(folder / "cache", folder, validation_percent=20.0)
        assert read_index(made.path).documents in (60, 61)
    except DataError as error:
        said = str(error)
    assert "\n" not in said
    assert not said or str(folder) in said


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"^source: /nowhere does not exist. Name a path that the nodes see, too."):
        _prepare(tmp_path, Path("/nowhere"))
    (tmp_path / "empty.txt").touch()
    with pytest.raises(DataError, match=r"^source: .*empty.txt is empty."):
        _prepare(tmp_path / "cache", tmp_path / "empty.txt")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=r"^source: .*pipe is neither a file nor a folder."):
        _prepare(tmp_path / "cache", tmp_path / "pipe")
    assert str(DataError("is bad.", "source").within("run.language")) == "run.language.source: is bad."


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "small"
    folder.mkdir()
    if os.getuid() != 0 or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder]).returncode:
        pytest.skip("needs root, to mount a small file system")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk(small_disk: Path, tmp_path: Path) -> None:
    source = _lines(tmp_path / "a.jsonl", _numbered(20_000))
    with pytest.raises(
        DataError, match=r"^shards_folder: .*small has no room for the tokens \(No space left on device\). Free"
    ):
        _prepare(small_disk, source)
    assert not list(small_disk.iterdir())
    (tmp_path / "file").touch()
    with pytest.raises(
        DataError, match=r"^shards_folder: .*file can't be written to \(Not a directory\). Name another"
    ):
        _prepare(tmp_path / "file", source)


def test_an_index_remembers(tmp_path: Path) -> None:
    index = Index(Bytes().id, "uint8", train=[], validation=[], documents=3, duplicate_documents=2, empty=1)
    index.write(tmp_path)
    assert read_index(tmp_path) == index
