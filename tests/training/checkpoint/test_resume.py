"""Test that a killed and resumed run has the same losses, float for float, as an undisturbed one (protocols.md §4)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.training.ranks import TINY, Run, Sabotage
from training import manifest
from training.attempt.heartbeat import heartbeat_path, read_beat
from training.attempt.lineage import newest_on_lineage
from training.launch.watchdog import LIMITS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Run]:
    """Return an undisturbed run by world size."""
    runs = {}
    for world in (1, 2, 3, 4):
        runs[world] = Run(tmp_path_factory.mktemp("whole") / str(world))
        runs[world].finish(world)
    return runs


@pytest.mark.parametrize(("world", "killed_in", "saved"), [(2, 6, 4), (2, 12, 8), (3, 9, 8), (4, 7, 4), (4, 11, 8)])
@pytest.mark.sampled(2)
def test_hex_equal_after_a_rank_was_killed(
    world: int, killed_in: int, saved: int, whole: dict[int, Run], tmp_path: Path
) -> None:
    run = Run(tmp_path / "run")
    committed = run.job_dir / "checkpoints" / f"step-{saved}" / "COMMITTED"
    dying = Sabotage("training.step.norms:GradientNorm.__call__", call=killed_in, rank=1, until=str(committed))
    codes = run.start(world, sabotage=dying).wait()
    assert codes[1] == -9
    assert all(code != 0 for code in codes)
    run.finish(world, resume=newest_on_lineage(run.job_dir))
    assert run.events("run.started")[0]["resumed_from"] == f"step-{saved}"
    for rank in range(world):
        assert _hex(run.series(rank=rank)) == _hex(whole[world].series(rank=rank))
        assert _hex(run.series("gradient_norm", rank)) == _hex(whole[world].series("gradient_norm", rank))
    assert _digests(run) == _digests(whole[world])


KILLS = {
    "staging": ("training.checkpoint.storage:write", ""),
    "half a file": ("training.checkpoint.storage:_Stream.flush", ""),
    "all files, no manifest": ("training.checkpoint.writing:CheckpointWriter.make_manifest", ""),
    "manifest, no rename": ("training.checkpoint.committing:move_aside", ""),
    "renamed, not told": ("training.checkpoint.events:report_committed", "step-4"),
    "told, not verified": ("training.checkpoint.writing:CheckpointWriter.verify_and_prune", "step-4"),
}


@pytest.mark.parametrize(("target", "expected"), KILLS.values(), ids=KILLS)
@pytest.mark.sampled(2)
def test_killed_while_saving(target: str, expected: str, whole: dict[int, Run], tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    incarnation = run.start(1, sabotage=Sabotage(target))
    assert incarnation.wait() == [-9], incarnation.output()
    assert newest_on_lineage(run.job_dir) == expected
    run.finish(1, resume=expected)
    _is_like(run, whole[1])
    if expected:
        reports = [event["name"] for event in run.events("checkpoint.committed")]
        assert reports == [expected, "step-8", "step-12"]  # what the first process had no time to report


def test_killed_while_pruning(tmp_path: Path) -> None:
    """A checkpoint that was being deleted is gone; it never counts as one again."""
    settings = {**TINY, "keep_checkpoints": 1, "checkpoint_every": 2}
    whole = Run(tmp_path / "whole", dict(settings))
    whole.finish(1)
    run = Run(tmp_path / "run", dict(settings))
    incarnation = run.start(1, sabotage=Sabotage("training.checkpoint.pruning:delete"))
    assert incarnation.wait() == [-9], incarnation.output()
    assert [found.name for found in run.checkpoints] == ["step-4", "step-6"]
    assert len(list((run.job_dir / "checkpoints").glob(".pruned-*"))) == 1
    run.finish(1, resume=newest_on_lineage(run.job_dir))
    assert run.events("checkpoint.pruned")[0]["name"] == "step-2", "the killed run may have had no time to report it"
    _is_like(run, whole)


def record_phase_of_clearing() -> None:
    """Report the heartbeat's text of a rank while it removes the rest of a save."""
    from training.checkpoint import saving

    delete = saving.delete

    def recording_delete(folder: Path) -> None:
        attempt = Path(os.environ["VIGIL_ATTEMPT_DIR"])
        beat = read_beat(heartbeat_path(attempt, rank=0, incarnation=0))
        (attempt / "phase").write_text(beat.phase if beat else "start")
        delete(folder)

    saving.delete = recording_delete  # type: ignore[attr-defined]


def test_removing_half_a_checkpoint_may_take_longer_than_meeting(tmp_path: Path) -> None:
    """It may be of any size, and a file system slow."""
    run = Run(tmp_path / "run", {**TINY, "steps": 4}, spy=f"{__name__}:record_phase_of_clearing")
    half = run.job_dir / "checkpoints" / ".step-9.0"
    half.mkdir(parents=True)
    incarnation = run.finish(1)
    assert not half.exists()
    assert LIMITS[(incarnation.attempt_dir / "phase").read_text()] > 10 * LIMITS["init"]


def _is_like(run: Run, whole: Run) -> None:
    assert _hex(run.series()) == _hex(whole.series())
    names = sorted(path.name for path in (run.job_dir / "checkpoints").iterdir())
    assert not [name for name in names if name.startswith(".")]
    for found in run.checkpoints:
        manifest.verify(run.job_dir / "checkpoints" / found.name)


def _hex(series: dict[int, float]) -> dict[int, str]:
    return {step: value.hex() for step, value in series.items()}


def _digests(run: Run) -> dict[str, str]:
    """Return digests of the last checkpoint's tensors; `.metadata` also holds a random id."""
    return {file.file: file.sha256 for file in run.checkpoints[-1].files if file.file != ".metadata"}
