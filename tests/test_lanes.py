"""Test `tests.lanes`: stages run in parallel, each is printed completely, and a table shows each folder's seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lanes import Proof, total
from tests.seconds import Seconds

STAGES = {
    "good": "mv {folder}/new {folder}/good.tsv; echo one line of good; echo '2 passed, 1 skipped in 0.50s'",
    "bad": "echo what was wrong; echo '1 failed, 3 passed, 1 rerun in 61.20s (0:01:01)'; exit 2",
    "after": "echo '== 4 passed in 1.00s =='",
    "waits": "until test -e {folder}/stage-after.log; do sleep 0.01; done",
    "stage-after": "true",
}


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a make that knows STAGES in place of the real one."""
    script = tmp_path / "make"
    cases = "".join(f"{name}) {text.format(folder=tmp_path)};;\n" for name, text in STAGES.items())
    script.write_text(f'#!/bin/sh\ncase "$2" in\n{cases}esac\n')
    script.chmod(0o755)
    monkeypatch.setenv("MAKE", str(script))
    (tmp_path / "new").write_text("folder\tfile\ttests\tseconds\ntests/jobs\ttests/jobs/test_a.py\t3\t61.50\n")
    (tmp_path / "bad.tsv").write_text("of a run before this one")


@pytest.mark.usefixtures("make")
def test_every_stage_is_printed_and_failed_ones_again_at_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Proof([["bad", "after"], ["good"]], tmp_path, tmp_path).run() == 1
    output = capsys.readouterr().out
    assert "one line of good" in output
    assert output.count("what was wrong") == 2, "when it was done, and at the end"
    assert output.rindex("what was wrong") > output.rindex("one line of good")
    last = output.splitlines()[-1]
    assert "    61.5 s  100%      3 tests  tests/jobs\n" in output
    assert last.startswith("1 failed, 9 passed, 1 skipped, 1 rerun in "), "pytest's words, of all together"
    assert (tmp_path / "bad.log").read_text().startswith("what was wrong")


@pytest.mark.usefixtures("make")
def test_lanes_run_at_the_same_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first lane waits for the second's stage."""
    assert Proof([["waits"], ["good", "stage-after"]], tmp_path, tmp_path).run() == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("2 passed, 1 skipped in ")


def test_only_last_lines_of_pytest_are_counted() -> None:
    assert total(["3 passed jobs in the list\n12 passed, 2 warnings in 3.10s\n"]) == "12 passed"
    assert total(["nothing of the kind"]) == "no tests ran"


def test_a_folder_takes_the_time_of_its_files_and_fixtures() -> None:
    seconds = Seconds()
    seconds.add("tests/jobs/test_a.py", 2.0, is_test=False)
    seconds.add("tests/jobs/test_a.py", 1.0, is_test=True)
    seconds.add("tests/jobs/test_b.py", 0.5, is_test=True)
    seconds.add("tests/portal/test_c.py", 4.0, is_test=True)
    folders = seconds.by_folder()
    assert folders.by_cost() == ["tests/portal", "tests/jobs"]
    assert (folders.seconds["tests/jobs"], folders.tests["tests/jobs"]) == (3.5, 2)
    assert seconds.table().splitlines()[1] == "tests/portal\ttests/portal/test_c.py\t1\t4.00"
