"""Test what real ranks measure of themselves, and profiles of their steps."""

from __future__ import annotations

import gzip
import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.training.ranks import TINY, Run
from training.comm._replicas import Replicas

pytestmark = pytest.mark.slow
PARTS = ("forward_seconds", "backward_seconds", "optimizer_seconds")


def trace(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return found


def test_two_ranks_report_where_their_time_goes(tmp_path: Path) -> None:
    """A single run measures parts of every step, samples of communication, a configured profile and a requested one."""
    changes: dict[str, Any] = {"steps": 400, "checkpoint_every": 100, "global_batch": 4, "sample_seconds": 0.05}
    run = Run(tmp_path / "run", {**TINY, **changes, "profile_at": 30, "profile_steps": 3, "flush_steps": 5})
    options = {"id": "abc123", "directory": "attempt-1", "rank": 1, "steps": 2}
    (run.folder / "portal" / "profile.json").write_text(json.dumps(options))
    incarnation = run.start(2)
    assert incarnation.wait() == [0, 0], incarnation.output()

    steps = run.series("step_seconds")
    parts = [run.series(name) for name in PARTS]
    assert all(set(part) == set(range(1, 401)) for part in parts)
    for step, whole in steps.items():
        assert 0 < sum(part[step] for part in parts) <= whole
    assert not run.series("forward_seconds", rank=1)  # rank 0 reports them
    assert not run.series("mfu")  # no GPU: no peak
    assert set(run.series("checkpoint_seconds")) == {100, 200, 300, 400}
    shares = run.series("communication_share")
    assert shares
    assert all(0 < share < 1 for share in shares.values())
    assert set(run.series("communication_seconds")) == set(shares)

    verdict = run.events("run.verdict")[-1]
    assert verdict["bound"] in {"compute", "memory", "communication", "host", "input"}
    assert verdict["last_step"] == 400
    assert math.isclose(sum(verdict["split"].values()), verdict["step_seconds"])
    assert {"forward", "backward", "optimizer", "communication", "data", "other"} <= set(verdict["split"])
    assert verdict["mfu"] is None

    folder = incarnation.attempt_dir / "profiles"
    (report,) = run.events("profile.saved")
    assert (report["id"], report["first_step"], report["last_step"], report["of_rank"]) == ("config", 30, 32, 0)
    assert report["bytes"] == (folder / report["name"]).stat().st_size
    names = {str(event.get("name")) for event in trace(folder / report["name"])}
    assert {"aten::mm", "gloo:all_reduce"} <= names
    (other,) = folder.glob("*.rank1.abc123.json.gz")
    assert trace(other)
    assert not list(folder.glob(".*.part")) + list(folder.glob(".*.json"))

    unwatched = Run(tmp_path / "unwatched", {**TINY, **changes, "sample_seconds": 0.0})
    unwatched.finish(2)
    assert unwatched.series() == run.series()  # looking changes no bit
    assert not unwatched.series("communication_share")


def test_a_pipeline_reports_forward_and_backward_together(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {**TINY, "steps": 6, "checkpoint_every": 0, "mesh": {"pp": 2}, "parallelism": "fsdp"})
    run.finish(2)
    assert set(run.series("forward_backward_seconds")) == set(range(1, 7))
    assert not run.series("forward_seconds")
    assert run.events("run.verdict")[-1]["bound"] is None  # six steps are too few


def slow_exchange() -> None:
    """Delay exchanges like a slow network."""
    average = Replicas._average

    def slowly(replicas: Replicas, tensors: Iterable[Tensor]) -> None:
        time.sleep(0.05)
        average(replicas, tensors)

    Replicas._average = slowly  # type: ignore[method-assign]


def test_what_replicas_exchange_between_steps_is_communication(tmp_path: Path) -> None:
    changes = {"steps": 60, "checkpoint_every": 0, "sample_seconds": 0.05, "communication": "local_sgd"}
    run = Run(tmp_path / "run", {**TINY, **changes, "local_sgd": {"every": 4}}, spy=f"{__name__}:slow_exchange")
    run.finish(2)
    exchanged = run.series("exchange_seconds")
    assert [step for step, seconds in exchanged.items() if seconds > 0.1] == list(range(4, 61, 4))
    assert all(exchanged[step] < seconds for step, seconds in run.series("step_seconds").items())
    verdict = run.events("run.verdict")[-1]
    assert verdict["bound"] == "communication", "the host does not wait for itself"
    assert verdict["split"]["communication"] > 2 * verdict["split"].get("other", 0.0)


@pytest.mark.parametrize("resume", ["", "step-4"])
def test_the_first_step_of_a_start_can_be_profiled(resume: str, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", {**TINY, "steps": 4, "profile_at": 5 if resume else 1, "profile_steps": 2})
    run.finish(1)
    if resume:
        assert not run.events("profile.saved"), "no step follows the last"
        run.write(steps=8)
        run.finish(1, resume=resume)
    (event,) = run.events("profile.saved")
    assert (event["first_step"], event["last_step"]) == ((5, 6) if resume else (1, 2))
