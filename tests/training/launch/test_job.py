"""Test the trainer under the real launcher: killed or stopped by signals, its losses equal an undisturbed run's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.training.ranks import SECONDS, TINY, Run
from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.exhaustive]  # test_launch_trainer.py does both in one run

# So many tiny steps that a signal sent after the first save always finds the run going on.
STEPS = 600
SETTINGS = {**TINY, "steps": STEPS, "checkpoint_every": 30, "validate_every": 40, "flush_steps": 10}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(tmp_path_factory.mktemp("whole") / "default" / "1-abcdef", dict(SETTINGS))
    run.finish(2)
    return run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path / "default" / "2-abcdef", dict(SETTINGS), launch={"ranks_per_node": 2})


def _launch(run: Run) -> subprocess.Popen[bytes]:
    run.attempts += 1
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(run.attempts - 1)}
    return subprocess.Popen([sys.executable, "-P", "-m", "training.launch", str(run.folder)], env=environment)


def _ranks(run: Run) -> dict[int, psutil.Process]:
    found = {}
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if "training" in command and str(run.folder / "portal" / "run.toml") in command:
            found[int(process.environ()["RANK"])] = process
    return found


def _once_saved(run: Run, name: str) -> None:
    until((run.job_dir / "checkpoints" / name / "COMMITTED").exists)


def _is_like(run: Run, whole: Run) -> None:
    for name in ("loss", "gradient_norm", "validation_loss"):
        ours, theirs = run.series(name), whole.series(name)
        assert {step: value.hex() for step, value in ours.items()} == {
            step: value.hex() for step, value in theirs.items()
        }
    assert list(run.series()) == list(range(1, STEPS + 1)), "every step once in the line of record"
    assert not _ranks(run)


def test_a_killed_rank_is_restarted_in_place(run: Run, whole: Run) -> None:
    launcher = _launch(run)
    _once_saved(run, "step-30")
    _ranks(run)[1].kill()
    assert launcher.wait(SECONDS) == 0
    (again,) = run.events("run.started", incarnation=1)
    assert again["resumed_from"].startswith("step-")
    _is_like(run, whole)


def test_a_stopped_job_goes_on_when_it_is_requeued(run: Run, whole: Run) -> None:
    launcher = _launch(run)
    _once_saved(run, "step-30")
    for process in (psutil.Process(launcher.pid), *_ranks(run).values()):
        process.send_signal(signal.SIGTERM)
    assert launcher.wait(SECONDS) == 75
    stopped = run.checkpoints[-1]
    assert 30 <= stopped.step < STEPS
    assert _launch(run).wait(SECONDS) == 0
    assert run.events("run.started")[0]["resumed_from"] == stopped.name
    assert run.checkpoints[-1].parent is not None
    _is_like(run, whole)
