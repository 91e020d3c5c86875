"""Test guards in whole runs: an injected spike, flipped bit, sleeping rank or diverged loss is found and named."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.training.guards.planted import BATCH, planted_run, sample_at
from training.runtime.distributed import Agreement, StepFlags

pytestmark = pytest.mark.slow


def test_spike_flipped_bit_and_sleeper_are_named(tmp_path: Path) -> None:
    huge = sample_at(60, 5)
    planted = {"huge": huge, "sleeper": 3, "flip_rank": 2, "flip_call": 94}  # in step 79: each check takes two
    run = planted_run(tmp_path, planted, steps=200, check_weights_every=10)
    incarnation = run.start(4)
    assert incarnation.wait() == [1, 1, 1, 1], incarnation.output()

    (skipped,) = run.events("guard.skipped")
    assert skipped["step"] == 60
    assert skipped["norm"] > skipped["limit"] == pytest.approx(20 * skipped["mean"])
    assert skipped["samples"]["first_place"] == 59 * BATCH
    assert skipped["samples"]["count"] == len(skipped["samples"]["ids"]) == BATCH
    assert skipped["samples"]["ids"][5] == huge

    (straggler,) = run.events("straggler", rank=3)
    assert (straggler["rank"], straggler["part"]) == (3, "compute")
    assert straggler["factor"] > 1.5
    assert not any(run.events("straggler", rank=rank) for rank in range(3))

    (corruption,) = run.events("guard.corruption")
    about = {name: corruption[name] for name in ("check", "ranks", "step", "clean_step", "what")}
    assert about == {"check": "replica", "ranks": [2], "step": 80, "clean_step": 70, "what": about["what"]}
    assert "model.0.weight" in about["what"]
    assert "NumericsError: numerics.corruption: at step 80 the replica check finds rank 2 wrong" in incarnation.output()
    assert run.events("run.failed")[0]["exception"] == "NumericsError"


def test_what_is_sent_late_is_nothing_of_a_skipped_step(tmp_path: Path) -> None:
    run = planted_run(tmp_path, {"huge": sample_at(60, 5)}, steps=70, communication="topk", topk={"density": 0.05})
    run.finish(2)
    assert [event["step"] for event in run.events("guard.skipped")] == [60]


def wait_for_flags() -> None:
    """The second rank comes to the flags early and waits, as on a GPU: there no exchange holds the host up before."""
    end = Agreement.end

    def waiting(agreement: Agreement) -> StepFlags:
        time.sleep(0.03 if os.environ["RANK"] == "1" else 0.0)
        return end(agreement)

    Agreement.end = waiting  # type: ignore[method-assign]


def test_who_waits_for_others_is_not_slow(tmp_path: Path) -> None:
    run = planted_run(tmp_path, {}, steps=70)
    run.spy = f"{__name__}:wait_for_flags"
    run.finish(2)
    assert not run.events("straggler", rank=0) + run.events("straggler", rank=1)


def test_a_rank_that_differs_from_itself_is_named(tmp_path: Path) -> None:
    run = planted_run(tmp_path, {"flaky": 1}, steps=60, check_weights_every=5)
    incarnation = run.start(2)
    assert incarnation.wait() == [1, 1], incarnation.output()
    (event,) = run.events("guard.corruption")
    assert (event["check"], event["ranks"], event["what"]) == ("repeat", [1], "loss")
    assert event["clean_step"] == event["step"] - 5


def test_checks_change_no_number(tmp_path: Path) -> None:
    plain = planted_run(tmp_path / "plain", {}, steps=12)
    checked = planted_run(tmp_path / "checked", {}, steps=12, check_weights_every=1)
    for run in (plain, checked):
        run.finish(2)
    assert _hex(plain.series()) == _hex(checked.series())


@pytest.mark.parametrize("parallelism", ["zero1", "fsdp"])
def test_every_optimizer_skips_alike(parallelism: str, tmp_path: Path) -> None:
    runs = [
        planted_run(tmp_path / name, {"huge": sample_at(56, 3)}, steps=62, parallelism=name)
        for name in ("ddp", parallelism)
    ]
    for run in runs:
        run.finish(2)
        assert [event["step"] for event in run.events("guard.skipped")] == [56]
    assert list(runs[0].series().values()) == pytest.approx(list(runs[1].series().values()), rel=1e-4)


def test_too_many_skipped_steps_stop_the_run(tmp_path: Path) -> None:
    run = planted_run(tmp_path, {"burst": 60}, steps=200)
    incarnation = run.start(1)
    assert incarnation.wait() == [1]
    assert len(run.events("guard.skipped")) >= 10
    (event,) = run.events("guard.divergence")
    assert event["what"].startswith("10 of 28 steps had a gradient norm above 20 times the usual")
    assert "NumericsError: numerics.divergence" in incarnation.output()


def test_a_changed_level_is_reported_and_ends_no_run(tmp_path: Path) -> None:
    """Seven skipped steps are fewer than end it, and no longer count once it is learned."""
    run = planted_run(tmp_path, {"level": 60}, steps=80)
    run.finish(1)
    assert [event["step"] for event in run.events("guard.skipped")] == list(range(60, 67))
    (level,) = run.events("guard.level")
    assert (level["step"], level["norm"] > 20 * level["mean"]) == (67, True)


def test_a_loss_that_leaves_for_good_stops_all_ranks(tmp_path: Path) -> None:
    run = planted_run(tmp_path, {"worse": 200}, steps=600, checkpoint_every=50)
    incarnation = run.start(2)
    assert incarnation.wait() == [1, 1], incarnation.output()
    (event,) = run.events("guard.divergence")
    assert 250 < event["step"] < 330
    assert "NumericsError: numerics.divergence: at step" in incarnation.output()
    assert list(run.series(rank=0)) == list(run.series(rank=1))


def test_goes_on_with_the_very_same_clipping_and_skips(tmp_path: Path) -> None:
    """Armed guards decide the numbers, so a resume has to go on from what they knew."""
    run = planted_run(tmp_path, {"huge": sample_at(70, 3)}, steps=80, checkpoint_every=40, clip=0.001, flush_steps=7)
    run.finish(1)
    whole = {name: _hex(run.series(name)) for name in ("loss", "gradient_norm")}
    assert [event["step"] for event in run.events("guard.skipped")] == [70]
    run.finish(1, resume="step-40")
    assert {name: _hex(run.series(name)) for name in ("loss", "gradient_norm")} == whole
    assert [event["step"] for event in run.events("guard.skipped")] == [70]


def _hex(values: dict[int, float]) -> dict[int, str]:
    return {step: value.hex() for step, value in values.items()}
