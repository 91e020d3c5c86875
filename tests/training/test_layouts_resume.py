"""A run resumed on its own layout has the same losses, bit for bit; on another one the same weights and first loss."""

from __future__ import annotations

import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from tests.training.digesting import digests
from tests.training.ranks import TINY, Run, Sabotage
from training.launch.attempt import newest_on_lineage

pytestmark = pytest.mark.slow

MODEL = {"layers": 4, "heads": 4, "kv_heads": 2, "head_width": 8, "context": 16}
CONFIG: dict[str, Any] = {**TINY, "global_batch": 16, "checkpoint_every": 4, "language": MODEL}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "ddp": (4, {}),
    "ddp of 2": (2, {}),
    "zero1": (4, {"parallelism": "zero1"}),
    "fsdp": (4, {"parallelism": "fsdp"}),
    "fsdp of 2": (2, {"parallelism": "fsdp"}),
    "hsdp": (4, {"parallelism": "fsdp", "mesh": {"dp": 2, "shard": 2}}),
    "tp": (2, {"mesh": {"tp": 2}}),
    "pp": (2, {"mesh": {"pp": 2}}),
    "zbv": (2, {"mesh": {"pp": 2}, "pipeline": {"schedule": "ZBVZeroBubble"}}),
    "cp": (2, {"mesh": {"cp": 2}}),
    "fsdp and tp": (4, {"parallelism": "fsdp", "mesh": {"tp": 2}}),
    "pp and fsdp": (4, {"parallelism": "fsdp", "mesh": {"pp": 2}}),
}
WITH_DROPOUT = {"language": {**MODEL, "dropout": 0.2}}
SPY = "tests.training.digesting:install"


def run_of(folder: Path, layout: str, **changes: Any) -> tuple[Run, int]:
    world, config = LAYOUTS[layout]
    return Run(folder, {**CONFIG, **config, **changes}, spy=SPY), world


@pytest.mark.parametrize("layout", ["zero1", "fsdp", "hsdp", "tp", "pp", "zbv", "cp", "fsdp and tp", "pp and fsdp"])
def test_hex_equal_on_its_own_layout(layout: str, tmp_path: Path) -> None:
    """Killed in the ninth step, once step 8 is saved. (ddp: test_resume.)"""
    whole, world = run_of(tmp_path / "whole", layout, **WITH_DROPOUT)
    whole_dir = whole.finish(world).attempt_dir
    run, _ = run_of(tmp_path / "run", layout, **WITH_DROPOUT)
    committed = run.job_dir / "checkpoints" / "step-8" / "COMMITTED"
    dying = Sabotage("training.norms:GradientNorm.__call__", call=9, rank=world - 1, until=str(committed))
    assert run.start(world, sabotage=dying).wait()[world - 1] == -9
    resumed = run.finish(world, resume=newest_on_lineage(run.job_dir))
    assert run.events("run.started")[0]["resumed_from"] == "step-8"
    for rank in range(world):
        for name in ("loss", "gradient_norm"):
            found, expected = run.series(name, rank), whole.series(name, rank)
            assert {step: value.hex() for step, value in found.items()} == {
                step: value.hex() for step, value in expected.items()
            }
    assert digests(resumed.attempt_dir, "ended") == digests(whole_dir, "ended")


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("ddp", ["one", "fsdp of 2", "zero1"]),
        ("fsdp", ["fsdp of 2", "one", "pp"]),
        ("tp", ["one", "ddp of 2"]),
        ("fsdp and tp", ["fsdp", "tp", "one", "pp and fsdp", "zero1"]),
        ("pp and fsdp", ["fsdp and tp", "zbv", "one"]),
        ("zero1", ["zero1", "ddp of 2", "fsdp of 2"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "to",
)
def test_the_same_run_on_other_layouts(written: str, read: list[str], tmp_path: Path) -> None:
    """What was saved at step 8 is read whole and alike, and the next loss is the one that would have come."""
    first, world = run_of(tmp_path / "first", written, steps=8)
    digested = digests(first.finish(world).attempt_dir, "ended")
    went_on, _ = run_of(tmp_path / "went-on", written, steps=9)
    shutil.copytree(first.job_dir, went_on.job_dir, dirs_exist_ok=True)
    went_on.attempts = first.attempts
    went_on.finish(world, resume="step-8")
    expected = fmean(went_on.series(rank=rank)[9] for rank in range(world))
    for layout in read:
        run, ranks = run_of(tmp_path / layout, layout, steps=9)
        shutil.copytree(first.job_dir, run.job_dir, dirs_exist_ok=True)
        run.attempts = first.attempts
        attempt_dir = run.finish(ranks, resume="step-8").attempt_dir
        assert digests(attempt_dir, "restored") == digested, layout
        assert fmean(run.series(rank=rank)[9] for rank in range(ranks)) == pytest.approx(expected, rel=1e-6), layout
