"""Test profiles of steps: started by configuration or by the portal's file, once, without disturbing training."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from training.attempt.heartbeat import NullHeartbeat
from training.metrics import profiling
from training.metrics.profiling import Profiling
from training.reporting.reporter import NullReporter


class Recorder(NullReporter):
    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def event(self, kind: str, **data: Any) -> None:
        self.events.append({"kind": kind, **data})


@pytest.fixture(autouse=True)
def _polls_at_every_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "POLL_SECONDS", 0.0)


@pytest.fixture
def attempt(tmp_path: Path) -> Path:
    (tmp_path / "portal").mkdir()
    folder = tmp_path / "job" / "attempt-1"
    folder.mkdir(parents=True)
    return folder


def profiles(attempt: Path, reporter: Recorder, *, rank: int = 0, at: int = 0, steps: int = 2) -> Profiling:
    run_dir = attempt.parent.parent
    return Profiling(run_dir, attempt, rank, at=at, steps=steps, reporter=reporter, heartbeat=NullHeartbeat())


def train(profile: Profiling, last: int) -> list[bool]:
    """Pass boundaries 0 to `last`; return, for each, whether a profile was being recorded after it."""
    found = []
    for step in range(last + 1):
        profile.between(step)
        found.append(profile.is_recording)
        torch.ones(3) @ torch.ones(3)
    return found


def request_profile(attempt: Path, **changes: Any) -> None:
    options = {"id": "abc123", "directory": attempt.name, "rank": 0, "steps": 2, **changes}
    (attempt.parent.parent / "portal" / "profile.json").write_text(json.dumps(options))


def test_records_the_configured_steps_once(attempt: Path) -> None:
    report = Recorder()
    assert train(profiles(attempt, report, at=3), 6) == [False, False, True, True, False, False, False]
    (saved,) = report.events
    assert (saved["kind"], saved["first_step"], saved["last_step"]) == ("profile.saved", 3, 4)
    found = json.loads(gzip.decompress((attempt / "profiles" / saved["name"]).read_bytes()))
    assert found["traceEvents"]
    # A later incarnation repeats that step, and the configuration is for rank 0 alone.
    assert not any(train(profiles(attempt, report, at=3), 6))
    assert not any(train(profiles(attempt, report, at=3, rank=1), 6))
    assert len(report.events) == 1


def test_records_what_the_portal_requests_of_this_rank(attempt: Path) -> None:
    report = Recorder()
    request_profile(attempt, rank=1, steps=3)
    assert not any(train(profiles(attempt, report), 4))
    assert train(profiles(attempt, report, rank=1), 4) == [True, True, True, False, False]
    assert report.events[0]["name"] == "step-1-3.rank1.abc123.json.gz"
    request_profile(attempt, rank=1, steps=10**9, id="more")
    profile = profiles(attempt, report, rank=1)
    assert all(train(profile, profiling.MAX_STEPS - 1))  # no more than that, whatever is requested
    profile.close(profiling.MAX_STEPS)
    assert [event["kind"] for event in report.events] == ["profile.saved"] * 2


@pytest.mark.parametrize(
    "wrong",
    [{"directory": "attempt-2"}, {"id": "../../x"}, {"id": 7}, {"id": ""}, {"rank": 3}, {"rank": "0"}],
)
def test_ignores_what_is_not_for_it(attempt: Path, wrong: dict[str, Any]) -> None:
    report = Recorder()
    request_profile(attempt, **wrong)
    assert not any(train(profiles(attempt, report), 3))
    assert not report.events
    assert not (attempt / "profiles").exists()


def test_a_run_that_ends_leaves_what_it_has(attempt: Path) -> None:
    report = Recorder()
    profile = profiles(attempt, report, at=2, steps=50)
    assert train(profile, 4)[-1]
    profile.close(4)
    assert (report.events[0]["first_step"], report.events[0]["last_step"]) == (2, 4)
    assert not profile.is_recording


def test_a_profile_that_an_incarnation_did_not_end_is_reported_by_the_next(attempt: Path) -> None:
    request_profile(attempt, steps=50)
    assert all(train(profiles(attempt, Recorder()), 3))
    again, later = Recorder(), Recorder()
    assert not any(train(profiles(attempt, again), 3))
    (failed,) = again.events
    assert (failed["kind"], failed["id"], failed["of_rank"]) == ("profile.failed", "abc123", 0)
    assert failed["reason"] == "its process ended before it was written"
    assert not any(train(profiles(attempt, later), 3))
    assert not later.events


def test_a_failure_is_reported_and_training_continues(attempt: Path) -> None:
    report = Recorder()
    (attempt / "profiles").write_text("in the way")
    assert not any(train(profiles(attempt, report, at=2), 4))
    (failed,) = report.events
    assert (failed["kind"], failed["id"]) == ("profile.failed", "config")
    assert failed["reason"]
