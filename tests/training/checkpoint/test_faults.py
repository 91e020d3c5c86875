"""Test checkpoints that are damaged, foreign, or out of space: the previous one counts, and the run continues."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.file_systems import small_file_system
from tests.training.ranks import TINY, Run
from tests.waiting import until
from training.attempt.lineage import newest_on_lineage

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run with checkpoints of steps 4, 8 and 12."""
    run = Run(tmp_path_factory.mktemp("faults") / "run")
    run.finish(1)
    return run


@pytest.fixture
def run(done: Run, tmp_path: Path) -> Run:
    """A copy of it that has steps left and may be spoilt."""
    shutil.copytree(done.folder, tmp_path / "run")
    found = Run.__new__(Run)
    found.__dict__.update(done.__dict__, folder=tmp_path / "run", config={**TINY}, attempts=done.attempts)
    found.write(steps=16)
    return found


def _shard(run: Run) -> Path:
    return run.job_dir / "checkpoints" / "step-12" / "__0_0.distcp"


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


SPOILT: dict[str, Callable[[Run], object]] = {
    "truncated": lambda run: os.truncate(_shard(run), 100),
    "a file gone": lambda run: _shard(run).unlink(),
    "half a manifest": lambda run: os.truncate(_shard(run).with_name("COMMITTED"), 100),
    "foreign, with torch's files alone": lambda run: _shard(run).with_name("COMMITTED").unlink(),
    "being written": lambda run: _shard(run).parent.rename(_shard(run).parent.with_name(".step-12.1")),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
@pytest.mark.sampled(2)
def test_the_previous_checkpoint_is_used(spoil: Callable[[Run], object], run: Run) -> None:
    spoil(run)
    assert newest_on_lineage(run.job_dir) == "step-8"


def test_skipped_checkpoints_are_reported_by_name(run: Run) -> None:
    os.truncate(_shard(run), 100)
    foreign = run.job_dir / "checkpoints" / "step-13"
    foreign.mkdir()
    (foreign / "model.pt").touch()
    incarnation = run.start(1, resume=newest_on_lineage(run.job_dir))
    assert incarnation.wait() == [0]
    assert "step-12 is ignored: __0_0.distcp has 100 bytes, the manifest says" in incarnation.output()
    assert (
        "step-13 is ignored: there is no COMMITTED manifest: it was never finished, or is not" in incarnation.output()
    )
    assert [event["name"] for event in run.events("checkpoint.damaged")] == ["step-12"]


def test_an_incomplete_checkpoint_that_was_chosen_is_reported_as_damaged(run: Run) -> None:
    os.truncate(_shard(run), 100)
    incarnation = run.start(1, resume="step-12")
    assert incarnation.wait() == [1]
    assert "step-12 can't be resumed from: __0_0.distcp has 100 bytes" in incarnation.output()
    assert [event["name"] for event in run.events("checkpoint.damaged")] == ["step-12"]


def test_silent_damage_is_refused_by_name_and_then_skipped(run: Run) -> None:
    _flip(_shard(run))
    incarnation = run.start(1, resume=newest_on_lineage(run.job_dir))
    assert incarnation.wait() == [1]
    assert "step-12 can't be resumed from: __0_0.distcp is not what was written" in incarnation.output()
    assert run.events("checkpoint.damaged")[0]["name"] == "step-12"
    assert newest_on_lineage(run.job_dir) == "step-8"
    run.finish(1, resume="step-8")
    assert run.checkpoints[-1].step == 16


def test_another_model_is_refused_by_name(run: Run) -> None:
    run.write(language={**TINY["language"], "layers": 3})
    incarnation = run.start(1, resume="step-12")
    assert incarnation.wait() == [1]
    assert "run.language" in incarnation.output()
    assert "step-12 was trained with" in incarnation.output()


ENDLESS = {
    "distributed": {**TINY, "steps": 100_000},
    "federated": {"recipe": "tabular", "rounds": 100_000, "clients": 4, "flush_steps": 1},
}


@pytest.fixture(params=ENDLESS)
def small_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Return a separate file system of 8 MiB, where one may be mounted."""
    place = tmp_path / "run" / "job" / "checkpoints"
    options = {**ENDLESS[request.param], "checkpoint_every": 10, "keep_checkpoints": 2}
    run = Run(tmp_path / "run", options, kind=request.param)
    assert run.job_dir == place.parent
    with small_file_system(place, "8m"):
        yield place


def test_a_full_disk_leaves_the_old_ones_and_the_run_going(small_disk: Path) -> None:
    run = Run.__new__(Run)
    run.__dict__.update(folder=small_disk.parent.parent, config={}, attempts=0, launch={}, added=None)
    incarnation = run.start(1)
    try:
        until(lambda: run.checkpoints)
        filler = small_disk / "filler"
        with open(filler, "wb") as file:
            _fill(file.fileno())
        skipped = until(lambda: run.events("checkpoint.skipped"))
        assert "No space left on device" in skipped[0]["reason"]
        assert "  not saved: rank 0: [Errno 28] No space left on device" in incarnation.output()
        there = run.checkpoints
        assert there, "the old ones are intact"
        filler.unlink()
        until(lambda: [found for found in run.checkpoints if found.step > skipped[-1]["step"]])
        assert incarnation.processes[0].is_alive()
        before = len(run.events("checkpoint.skipped"))
        with open(filler, "wb") as file:
            _fill(file.fileno())
        until(lambda: len(run.events("checkpoint.skipped")) > before)
        (incarnation.attempt_dir / "stop-requested").write_text('{"reason": "cancel"}')
        assert incarnation.wait() == [1]
        assert "could not be saved: rank 0: [Errno 28]" in incarnation.output()
        assert "Traceback" not in incarnation.output()
    finally:
        incarnation.kill()


def fill_the_logs_disk() -> None:
    """Fill the disk of the logs in a rank, so that none of its output is written."""
    full = os.open("/dev/full", os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(full, stream)


def test_a_log_on_a_full_disk_ends_no_rank(tmp_path: Path) -> None:
    """It lies on the disk of the checkpoints."""
    run = Run(tmp_path / "run", dict(TINY), spy=f"{__name__}:fill_the_logs_disk")
    run.finish(2)
    assert run.checkpoints[-1].step == TINY["steps"]


def _fill(file: int) -> None:
    """Fill all remaining space, repeatedly, because pruning frees some."""
    block = b"\0" * 65_536
    try:
        while True:
            os.write(file, block)
    except OSError:
        pass
