"""Test real ranks that decide when to save, report the cost, and keep what they have learnt after a restart."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.training.ranks import TINY, Run, Sabotage
from tests.waiting import until
from training.checkpoint.cadence import MIN_WRITES
from training.manifest import Manifest

pytestmark = pytest.mark.slow
SAVED, STEPS_DURING_SAVE = 8, 3


def test_ranks_save_when_rank_0_finds_it_best(tmp_path: Path) -> None:
    settings = {**TINY, "steps": 60, "checkpoint_every": 20, "keep_checkpoints": 100, "mtbf_hours": 1e-4}
    run = Run(tmp_path / "run", settings)
    assert run.start(2, patient=False).wait() == [0, 0]
    report = run.events("checkpoint.cadence")
    assert report
    assert (report[0]["source"], report[0]["automatic"]) == ("config", False)
    assert report[0]["mtbf_seconds"] == pytest.approx(0.36)
    assert report[0]["best_overhead_fraction"] > 0
    # No interval is better than the best, but one that is shorter than the writes allow may seem so.
    allowed = report[0]["interval_seconds"] >= MIN_WRITES * report[0]["write_seconds"]
    assert not allowed or report[0]["best_overhead_fraction"] <= report[0]["overhead_fraction"]
    assert 0 <= report[0]["stall_seconds"] <= report[0]["cost_seconds"]

    path = run.job_dir / "checkpoints" / "step-60" / "COMMITTED"
    manifest = json.loads(path.read_text())
    assert manifest["state"]["cadence"]["costs"]
    manifest["state"]["cadence"]["interval"] = 0.05  # as if it had long found that best
    path.write_text(json.dumps(manifest))
    run.write(steps=400, checkpoint_every="auto")
    assert run.start(2, resume="step-60", patient=False).wait() == [0, 0]
    report = run.events("checkpoint.cadence")
    assert report[0]["automatic"]
    steps = [found.step for found in run.checkpoints if 60 < found.step < 400]
    assert steps, "saved by itself, both ranks at the same steps"
    assert all(item["interval_seconds"] >= MIN_WRITES * item["write_seconds"] for item in report)


def test_multiples_and_the_best_are_saved_and_retained(tmp_path: Path) -> None:
    settings = {
        **TINY, "steps": 24, "checkpoint_every": "auto", "keep_checkpoints": 1, "keep_every": 10, "keep_best": 1,
        "validate_every": 4, "validation_batches": 1,
    }  # fmt: skip
    run = Run(tmp_path / "run", settings)
    run.finish(1)
    losses = run.series("validation_loss")
    best = min((loss, step) for step, loss in losses.items())[1]
    stored = {found.step for found in run.checkpoints}
    assert {10, 20, best, 24} <= stored
    start_and_verified = 2
    assert len(stored) <= 4 + start_and_verified


def test_a_loss_whose_save_failed_is_not_among_the_best(tmp_path: Path) -> None:
    """The first validation is as good as any where nothing is learned; its state is lost, so the next one counts."""
    settings = {
        **TINY, "steps": 8, "learning_rate": 1e-30, "checkpoint_every": 0, "keep_best": 1, "validate_every": 2,
    }  # fmt: skip
    run = Run(tmp_path / "run", settings)
    full = Sabotage("training.checkpoint.storage:_Stream.write", act="fail", rank=1)
    assert run.start(2, sabotage=full).wait() == [0, 0]
    assert len(set(run.series("validation_loss").values())) == 1
    assert [found.step for found in run.checkpoints] == [4, 8]


def write_slowly() -> None:
    """Write so slowly that the next steps are done meanwhile."""
    from training.checkpoint.writing import CheckpointWriter, ManifestFields

    write = CheckpointWriter.write

    def slowly(writer: CheckpointWriter, state: Any, facts: ManifestFields, **options: Any) -> Manifest:
        time.sleep(0.5)
        return write(writer, state, facts, **options)

    CheckpointWriter.write = slowly  # type: ignore[method-assign]


def test_a_multiple_is_made_though_another_save_is_being_written(tmp_path: Path) -> None:
    settings = {**TINY, "steps": 8, "checkpoint_every": 3, "keep_every": 4}
    run = Run(tmp_path / "run", settings, spy=f"{__name__}:write_slowly")
    assert run.start(2, patient=False).wait() == [0, 0]
    assert [found.step for found in run.checkpoints] == [3, 4, 8], "the one of step 6 is skipped"
    stalls = run.series("checkpoint_seconds")
    assert stalls[4] > 0.3 > stalls[3], "training stood still until that of step 3 was written"


def run_ahead() -> None:
    """A host that runs ahead of its device: steps seem short, and are read to be longer, most of all during a write."""
    from training.checkpoint.writing import CheckpointWriter, ManifestFields
    from training.metrics.measuring import Measuring
    from training.metrics.meter import StepTimes
    from training.runtime.distributed import StepFlags
    from training.trainer import Trainer

    run_step, write = Trainer._run_step, CheckpointWriter.write
    steps = 0

    def step_during_write(trainer: Trainer) -> StepFlags:
        nonlocal steps
        if steps == SAVED + STEPS_DURING_SAVE:
            until(lambda: not trainer.checkpoints.is_saving)
        agreed = run_step(trainer)
        steps += 1
        return agreed

    def write_during_steps(writer: CheckpointWriter, state: Any, facts: ManifestFields, **options: Any) -> Manifest:
        if facts.step == SAVED:
            until(lambda: steps == SAVED + STEPS_DURING_SAVE)
        return write(writer, state, facts, **options)

    def read(measuring: Measuring, step: int, times: StepTimes) -> dict[str, float]:
        return {"step_seconds": 30.0 if times.saving else 10.0}

    Trainer._run_step = step_during_write  # type: ignore[method-assign]
    CheckpointWriter.write = write_during_steps  # type: ignore[method-assign]
    Measuring.read = read  # type: ignore[method-assign]


def test_a_write_costs_what_the_device_lost_to_it(tmp_path: Path) -> None:
    settings = {**TINY, "steps": 2 * SAVED, "checkpoint_every": SAVED, "flush_steps": 1000, "flush_seconds": 60.0}
    run = Run(tmp_path / "run", settings, spy=f"{__name__}:run_ahead")
    assert run.start(1, patient=False).wait() == [0]
    (event,) = run.events("checkpoint.cadence")
    assert event["cost_seconds"] - event["stall_seconds"] == pytest.approx(STEPS_DURING_SAVE * 20)
    assert event["interval_seconds"] == pytest.approx(SAVED * 10 + event["cost_seconds"])
