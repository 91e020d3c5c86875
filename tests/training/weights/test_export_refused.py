"""Test exports to Hugging Face's format that are refused or stopped: one sentence, and no partial output."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest

from tests.training.weights.exported import checkpoint_of, tokenizer_of
from training.__main__ import main
from training.config import choices
from training.weights import export_hugging_face
from training.weights.export_hugging_face import CONFIG_OPTIONS, TRAINING_OPTIONS

REFUSED: dict[str, tuple[dict[str, Any], list[str], str]] = {
    "another recipe": ({"config": {"recipe": "vision", "vision": {}}}, [], "it is of the recipe vision, and only"),
    "an option to come": (
        {"config": {"recipe": "language", "language": {"qk_norm": True}}},
        [],
        "it was trained with qk_norm = true, which a Llama's config.json has no word for",
    ),
    "other sizes": (
        {"config": {"recipe": "language", "language": {"layers": 3}}},
        [],
        "it has other tensors than its settings make",
    ),
    "adapters alone": (
        {"config": {"recipe": "language", "language": {"lora_rank": 4, "from_weights": "/gone"}}},
        [],
        "it holds adapters alone, and this folder is of whole weights. Add --merged",
    ),
    "no tokenizer any more": (
        {"data": "notes+words-01234567+0123456789"},
        [],
        "were made with words-01234567, which is no longer at /gone/tokenizer.json. Name that tokenizer.json",
    ),
    "another tokenizer": (
        {"data": "notes+words-01234567+0123456789"},
        ["--tokenizer", "/dev/null"],
        "were made with words-01234567, and --tokenizer /dev/null is another file",
    ),
    "options that are no table": (
        {"config": {"recipe": "language", "language": [1]}},
        [],
        "its manifest is damaged: the options of its recipe 'language' are no table",
    ),
    "adapters that can't be": (
        {"config": {"recipe": "language", "language": {"lora_rank": [1], "from_weights": "/gone"}}},
        [],
        "its manifest is damaged: its adapter options are invalid",
    ),
    "endless positions": (
        {"config": {"recipe": "language", "language": {"layers": 2, "rope_factor": float("inf")}}},
        [],
        "its settings make no decoder of what it holds",
    ),
    "numbers of layers": (
        {"config": {"recipe": "language", "language": {"layers": 10**12}}},
        [],
        "its settings make no decoder of what it holds",
    ),
    "words for a terminal": (
        {"config": {"recipe": "\x1b]0;mine\x07\ud800\n", "language": {}}},
        [],
        r"it is of the recipe \x1b]0;mine\x07\ud800\n, and only language",
    ),
    "data without a name": ({"data": ""}, [], "were made with an unknown tokenizer, which is no longer at"),
}


@pytest.mark.parametrize(("facts", "more", "words"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_expressed_is_refused_in_a_sentence(
    facts: dict[str, Any], more: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, _ = checkpoint_of(tmp_path / "run", tokenizer="/gone/tokenizer.json")
    report = checkpoint / "COMMITTED"
    report.write_text(json.dumps({**json.loads(report.read_text()), **facts}))
    assert main(["export", str(checkpoint), "--hf", str(tmp_path / "out"), *more]) == 1
    output = capsys.readouterr().err
    assert words in output
    assert output.startswith(str(checkpoint))
    assert output.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    "named", ["/dev/zero", "PIPE", "~nobody-of-this-name/x", "/a\0b", "/\ud800", "/" + "a" * 70_000]
)
def test_what_a_checkpoint_calls_its_tokenizer_is_opened_only_if_it_is_a_file(
    named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    checkpoint, _ = checkpoint_of(tmp_path / "run", "notes+words-01234567+0123456789")
    payload = json.loads((checkpoint / "COMMITTED").read_text())
    payload["config"]["language"]["tokenizer"] = str(tmp_path / "pipe") if named == "PIPE" else named
    (checkpoint / "COMMITTED").write_text(json.dumps(payload))
    assert main(["export", str(checkpoint), "--hf", str(tmp_path / "out")]) == 1
    output = capsys.readouterr().err
    assert (
        "its tokens were made with words-01234567, which is no longer at" in output
        or "Name that tokenizer.json" in output
    )
    assert output.count("\n") == 1
    assert len(output) < 3000


@pytest.mark.parametrize("places", [[], ["one.safetensors", "--hf", "two"]])
def test_there_is_a_single_place_to_write_to(places: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["export", "step-40", *places])
    assert "give the file to write, or --hf FOLDER" in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has files of somebody else's")
@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_links_to_files_of_others_next_to_a_tokenizer_are_not_exported(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, data = tokenizer_of(tmp_path / "words")
    checkpoint, _ = checkpoint_of(tmp_path / "run", data, vocabulary=16, tokenizer=str(path))
    (tmp_path / "secret").write_text("{}")
    (path.parent / name).symlink_to(tmp_path / "secret")
    os.chown(path, 10_001, -1)
    assert main(["export", str(checkpoint), "--hf", str(tmp_path / "out")]) == 1
    assert f"{path.parent / name} links to a file of another user." in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    os.chown(tmp_path / "secret", 10_001, -1)  # as in a cache, where all are of who fetched them
    assert main(["export", str(checkpoint), "--hf", str(tmp_path / "out")]) == 0
    assert (tmp_path / "out" / name).read_text()


def test_a_tokenizer_is_found_again_by_name_or_left_out(tmp_path: Path) -> None:
    path, data = tokenizer_of(tmp_path / "words")
    moved = path.rename(tmp_path / "elsewhere.json")
    checkpoint, _ = checkpoint_of(tmp_path / "run", data, vocabulary=16, tokenizer=str(path))
    for name, request in (("with", str(moved)), ("without", "none")):
        assert main(["export", str(checkpoint), "--hf", str(tmp_path / name), "--tokenizer", request]) == 0
    assert (tmp_path / "with" / "tokenizer.json").read_bytes() == moved.read_bytes()
    assert {path.name for path in (tmp_path / "without").iterdir()} == {"config.json", "model.safetensors"}


def test_a_token_beyond_the_embedding_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    beyond = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": {"16": {"content": "<|im_end|>"}}}
    path, data = tokenizer_of(tmp_path / "words", tokenizer_config=beyond)
    checkpoint, _ = checkpoint_of(tmp_path / "run", data, vocabulary=16, tokenizer=str(path))
    assert main(["export", str(checkpoint), "--hf", str(tmp_path / "out")]) == 1
    assert "adds '<|im_end|>' as token 16, but the model has 16. Remove it there, or" in capsys.readouterr().err


def test_every_option_is_exported_or_for_training_only() -> None:
    """A new one is put into one of the two lists, or its use is refused by name."""
    assert {option.name for option in choices.get("recipes", "language").options} == CONFIG_OPTIONS | TRAINING_OPTIONS
    assert not CONFIG_OPTIONS & TRAINING_OPTIONS


def test_where_there_is_no_room_a_sentence_is_left_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint, _ = checkpoint_of(tmp_path / "run")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        code = main(["export", str(checkpoint), "--hf", str(tmp_path / "out")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 1
    assert capsys.readouterr().err == (
        f"{tmp_path / 'out'}: File too large. Nothing was left there: free some space, or choose another place\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_lies_there_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint, _ = checkpoint_of(tmp_path / "run")
    (tmp_path / "out").mkdir()
    assert main(["export", str(checkpoint), "--hf", str(tmp_path / "out")]) == 1
    assert "exists. Remove it, or choose another name." in capsys.readouterr().err
    assert main(["export", str(checkpoint), "--hf", str(tmp_path / "none" / "out")]) == 1
    assert "none is not a folder. Create it, or choose another place." in capsys.readouterr().err
    (checkpoint / "COMMITTED").unlink()
    assert main(["export", str(checkpoint), "--hf", str(tmp_path / "new")]) == 1
    assert "there is no COMMITTED manifest: it was never finished" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["export", str(checkpoint), str(tmp_path / "a"), "--dtype", "bf16"])
    assert "--dtype, --shard-gb and --tokenizer go with --hf" in capsys.readouterr().err


def test_killed_at_any_file_it_leaves_nothing_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 gives nobody time to clear away; so config.json, without which nothing loads, is written last."""
    checkpoint, _ = checkpoint_of(tmp_path / "run")
    there: list[set[str]] = []
    write = export_hugging_face._write

    def check_then_write(path: Path, content: bytes) -> None:
        there.append({other.name for other in path.parent.iterdir()})
        assert not (tmp_path / "out").exists()
        write(path, content)

    monkeypatch.setattr(export_hugging_face, "_write", check_then_write)
    assert main(["export", str(checkpoint), "--hf", str(tmp_path / "out"), "--shard-gb", "0.00002"]) == 0
    assert "config.json" not in set().union(*there)
    assert there[-1] | {"config.json"} == {path.name for path in (tmp_path / "out").iterdir()}
