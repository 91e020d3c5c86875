"""Test vocabulary sizes from a tokenizer's file: nothing is refused for them before it is read, everything after."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.training.ranks import TINY, Run
from tests.training.tokenizers import write_tokenizer
from training.config import layout_checks
from training.config.run_config import parse

MODEL = {"layers": 2, "heads": 3, "head_width": 8, "hidden": 48, "context": 24}


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({}, True),
        ({"tokenizer": "bytes", "source": "/data/notes"}, True),
        ({"tokenizer": "/data/tokenizer.json"}, False),
        ({"source": "/data/shards"}, False),
        ({"tokenizer": "/data/tokenizer.json", "vocabulary": 32_000}, True),
        ({"tokenizer": "/data/tokenizer.json", "vocabulary": 32_001}, False),
    ],
)
def test_only_a_stated_vocabulary_is_refused(options: dict[str, Any], refused: bool) -> None:
    found = list(
        layout_checks.check(parse({"recipe": "language", "mesh": {"tp": 3}, "language": {**MODEL, **options}}), 3)
    )
    assert [problem.field for problem in found] == ["language.vocabulary"] * refused
    for problem in found:
        assert "which does not divide by mesh.tp, 3. Write " in problem.message
        better = {**MODEL, **options, "vocabulary": int(problem.message.partition("Write ")[2].partition(":")[0])}
        assert not list(layout_checks.check(parse({"recipe": "language", "mesh": {"tp": 3}, "language": better}), 3))


@pytest.mark.slow
def test_at_the_start_it_is_read(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "notes").mkdir()
    for number in range(40):
        (tmp_path / "notes" / f"{number}.txt").write_text(f"the siskin sings {number} at dawn " * 40)
    file = write_tokenizer(tmp_path / "words" / "tokenizer.json")  # seven tokens
    model = {**MODEL, "heads": 4, "context": 8, "source": str(tmp_path / "notes"), "tokenizer": str(file)}
    table = {**TINY, "steps": 3, "checkpoint_every": 0, "mesh": {"tp": 2}}

    odd = Run(tmp_path / "odd", {**table, "language": model})
    assert odd.start(2).wait() == [1, 1]
    (failed,) = odd.events("run.failed")
    assert "run.language.vocabulary: is 7, which does not divide by mesh.tp, 2. Write 8" in failed["error"]
    few = Run(tmp_path / "few", {**table, "mesh": {}, "language": {**model, "vocabulary": 6}})
    assert few.start(1).wait() == [1]
    (failed,) = few.events("run.failed")
    assert "run.language.vocabulary: is 6, but words-" in failed["error"]
    Run(tmp_path / "even", {**table, "language": {**model, "vocabulary": 8}}).finish(2)
