"""Test the regression set (tests/logs): accuracy and confidence of verdicts, and the owner of the fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from diagnosis.causes import CAUSES
from diagnosis.evaluate import LabelledCase, Score, evaluate, read_cases
from diagnosis.logs.files import Unreadable
from diagnosis.signatures.catalogue import shipped_catalogue
from vigil_cli.main import main

LOGS = Path(__file__).resolve().parents[1] / "logs"
ALL = list(read_cases(LOGS))
OOM = "CUDA out of memory. Tried to allocate 2.00 GiB"


@pytest.fixture(scope="module")
def score() -> Score:
    return evaluate(ALL, shipped_catalogue())


def test_there_are_logs_of_every_cause() -> None:
    assert len(ALL) >= 150
    assert {case.cause for case in ALL} == set(CAUSES)
    assert sum(case.cause == "none" for case in ALL) >= 25
    assert sum(case.cause == "unknown" for case in ALL) >= 15


@pytest.mark.lengthy
def test_most_verdicts_are_right(score: Score) -> None:
    wrong = [(item.case.name, item.verdict.cause) for item in score.judged if not item.is_right]
    assert score.accuracy >= 0.97, wrong


@pytest.mark.lengthy
def test_confident_verdicts_are_right(score: Score) -> None:
    right, wrong_owner, sure = score.sure()
    assert right / sure >= 0.97
    assert wrong_owner <= 1
    assert sure >= len(ALL) / 2, "being never sure is no way to be right"


@pytest.mark.lengthy
def test_every_line_of_evidence_is_at_its_line_number(score: Score) -> None:
    for item in score.judged[:60]:
        assert item.case.folder is not None
        for piece in item.verdict.evidence:
            if piece.line:
                line = item.case.complete_log(piece.file).split(b"\n")[piece.line - 1]
                words = piece.text.splitlines()[0][:40]
                assert words in line.decode(errors="replace") or piece.entry == "", (item.case.name, piece.line, words)


def test_the_command_scores_a_folder_and_lines_of_json(tmp_path: Path) -> None:
    lines = tmp_path / "cases.jsonl"
    reports = [
        {"id": "a", "label": "memory.gpu_oom", "alt": [], "log": f"RuntimeError: {OOM}"},
        {"id": "b", "label": "gpu.ecc", "alt": ["unknown"], "log": "nothing that says anything"},
        {"id": "c", "label": "gpu.ecc", "log": OOM},
    ]
    lines.write_text("\n".join(json.dumps(item) for item in reports))
    created = CliRunner().invoke(main, ["diagnose", "--evaluate", "--json", str(lines)])
    assert created.exit_code == 0, created.output
    answer = json.loads(created.output)
    assert (answer["right"], answer["cases"]) == (2, 3)
    (confusion,) = answer["confusion"]
    assert (confusion["expected"], confusion["verdict"], confusion["count"]) == ("gpu.ecc", "memory.gpu_oom", 1)
    assert (confusion["is"], confusion["said"]) == ("gpu.ecc", "memory.gpu_oom"), "the earlier names of these fields"
    created = CliRunner().invoke(main, ["diagnose", "--evaluate", str(lines)])
    assert "2 of 3 correct" in created.output


@pytest.mark.parametrize("text", ["no json", '{"label": "gpu.ecc"}', '{"label": "gpu.none", "log": "x"}', "[]"])
def test_cases_that_are_none_are_refused_in_a_sentence(tmp_path: Path, text: str) -> None:
    path = tmp_path / "cases.jsonl"
    path.write_text(text)
    with pytest.raises(Unreadable, match=r"cases\.jsonl"):
        list(read_cases(path))


def test_a_case_of_json_has_its_log_with_it() -> None:
    assert (
        LabelledCase("x", "none", logs={"x": "step 1 loss 2\nstep 2 loss 1\nstep 3 loss 1\n"})
        .verdict(shipped_catalogue())
        .cause
        == "none"
    )
