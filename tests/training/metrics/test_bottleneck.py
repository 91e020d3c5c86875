"""Test the finding of what limits a run: from measured numbers to the text, and what is not claimed."""

from __future__ import annotations

from typing import Any

import pytest

from training.metrics.bottleneck import MIN_STEPS, SPLIT, SlowRank, StepMeasurement, judge, split_of

USUAL = {"forward": 0.3, "backward": 0.6, "optimizer": 0.05, "other": 0.05}


def measured(**given: Any) -> StepMeasurement:
    usual: dict[str, Any] = {"steps": 100, "split": USUAL, "busy": 0.95, "exposed": 0.0, "matmul": 0.7, "on_gpu": True}
    return StepMeasurement(**{**usual, **given})


@pytest.mark.parametrize(
    ("bound", "given"),
    [
        ("compute", {}),
        ("compute", {"busy": None, "matmul": None, "mfu": 0.42}),
        ("memory", {"matmul": 0.3, "mfu": 0.1}),
        ("input", {"split": {**USUAL, "data": 0.4}}),
        ("communication", {"split": {**USUAL, "communication": 0.4}, "exposed": 0.3, "busy": 0.65, "world": 8}),
        ("host", {"busy": 0.5}),
        ("host", {"split": {**USUAL, "other": 0.5}, "busy": None, "matmul": None}),
        # Of two losses the larger one counts.
        ("input", {"split": {**USUAL, "data": 0.6, "communication": 0.3}, "exposed": 0.2, "busy": 0.75}),
    ],
)
def test_names_the_bound_with_its_numbers_and_a_remedy(bound: str, given: dict[str, Any]) -> None:
    report = judge(measured(**given))
    assert report.bound == bound
    assert "%" in report.because
    assert report.remedy


@pytest.mark.parametrize("part", ["data", "compute", "host"])
def test_a_named_straggler_comes_first(part: str) -> None:
    """The other ranks count the wait as communication."""
    waits = {"split": {**USUAL, "communication": 3.0}, "exposed": 0.75, "busy": 0.2, "world": 8}
    report = judge(measured(**waits, slow_rank=SlowRank(3, 14.02, part)))
    assert report.bound == "straggler"
    assert report.because.startswith("Rank 3 takes 14.0 times as long as the median rank, mostly ")
    assert report.remedy.startswith("Check that rank's node")
    assert judge(measured(**waits)).bound == "communication"


def test_what_is_not_measured_decides_nothing() -> None:
    few = judge(measured(steps=MIN_STEPS - 1))
    assert few.bound is None
    assert f"of {MIN_STEPS} steps measured" in few.because
    assert not few.remedy
    assert judge(measured(busy=None, exposed=None, matmul=None)).bound is None
    assert judge(measured(busy=None, exposed=None, matmul=None, mfu=0.2)).bound is None
    assert judge(StepMeasurement(steps=0)).bound is None


def test_the_remedy_fits_the_run() -> None:
    communication = {"split": {**USUAL, "communication": 0.4}, "exposed": 0.3, "busy": 0.65}
    assert "reshard" in judge(measured(**communication, parallelism="fsdp", world=8)).remedy
    assert "global_batch" in judge(measured(**communication, parallelism="ddp", world=8)).remedy
    assert "global_batch" not in judge(measured(**communication, parallelism="ddp", world=8, accumulation=4)).remedy
    assert "bf16" in judge(measured(dtype="fp32")).remedy
    assert "compile" in judge(measured(busy=0.5)).remedy
    assert "compile" not in judge(measured(busy=0.5, compiled=True)).remedy
    assert "larger global_batch" in judge(measured(busy=0.5)).remedy, "one micro-batch has the whole share already"
    assert "larger micro_batch" in judge(measured(busy=0.5, accumulation=4)).remedy


def test_no_remedy_is_suggested_that_the_run_would_refuse() -> None:
    all_of_it = frozenset(("compile", "fp8", "reshard"))
    communication = {"split": {**USUAL, "communication": 0.4}, "exposed": 0.3, "busy": 0.65}
    assert (
        "reshard"
        not in judge(measured(**communication, parallelism="fsdp", world=8, unusable_remedies=all_of_it)).remedy
    )
    assert "compile" not in judge(measured(busy=0.5, unusable_remedies=all_of_it)).remedy
    assert "compile" not in judge(measured(matmul=0.3, dtype="bf16", unusable_remedies=all_of_it)).remedy
    assert (
        judge(measured(dtype="bf16", unusable_remedies=all_of_it)).remedy
        == "This is as it should be. To go faster, try more GPUs."
    )
    assert "fp8" in judge(measured(dtype="bf16")).remedy


def test_a_step_is_split_into_parts_that_add_up() -> None:
    parts = {"forward": 1.0, "backward": 2.0, "optimizer": 0.5}
    exposed = {"backward": 0.25, "forward": 0.1, "optimizer": 0.0}
    split = split_of(step=4.0, data=0.2, parts=parts, checkpoint=0.1, exposed_by_part=exposed)
    assert split == pytest.approx(
        {
            "forward": 0.9,
            "backward": 1.5,
            "optimizer": 0.5,
            "communication": 0.6,
            "data": 0.2,
            "checkpoint": 0.1,
            "other": 0.3,
        }  # fmt: skip
    )
    assert sum(split.values()) == pytest.approx(4.1)
    assert set(split) <= set(SPLIT)


def test_what_replicas_exchange_between_steps_is_communication_whatever_a_sample_saw() -> None:
    parts = {"forward": 0.3, "backward": 0.6, "optimizer": 0.1, "exchange": 1.0}
    split = split_of(step=2.1, data=0.0, parts=parts, exposed_by_part={"optimizer": 0.5})
    assert split["communication"] == pytest.approx(1.05)
    assert set(split) <= set(SPLIT)
    report = judge(measured(split=split, exchange=1.0, busy=0.3))
    assert report.bound == "communication"
    assert "larger every" in report.remedy


def test_data_that_was_waited_for_while_the_device_worked_cost_nothing() -> None:
    split = split_of(step=3.5, data=1.0, parts={"forward": 1.0, "backward": 2.0, "optimizer": 0.4})
    assert split["data"] == pytest.approx(0.1)
    assert "other" not in split
