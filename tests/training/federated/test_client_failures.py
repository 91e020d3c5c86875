"""Test failing clients: one is dropped and named; if too few remain, the run ends with which and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training.federated.failing_clients import CLIENTS, planted_clients
from tests.training.ranks import Incarnation, Run
from training.federated import client_failures
from training.federated.task_results import ClientOutcomes
from training.federation.round_plan import RoundPlan

EVERYBODY = ",".join(map(str, range(CLIENTS)))


class Spy:
    """Record the events that it receives."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def event(self, kind: str, **data: Any) -> None:
        self.events.append({"kind": kind, **data})

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]


def _reporting(*names: str) -> tuple[client_failures.FailureReporter, Spy]:
    spy = Spy()
    return client_failures.FailureReporter(spy, names), spy  # type: ignore[arg-type]


def _facts(clients: int, *, dropped: int = 0, broken: int = 0) -> ClientOutcomes:
    is_fine = np.arange(clients) >= dropped + broken
    return ClientOutcomes(
        np.arange(clients), np.zeros(clients), is_fine, dict.fromkeys(range(dropped), "KeyError: 'x'")
    )


def _error() -> Exception:
    try:
        _deep(40)
    except ValueError as error:
        return error
    raise AssertionError


def _deep(calls: int) -> None:
    if calls:
        _deep(calls - 1)
    raise ValueError("wrong 😀 " + "x" * 5000)


class TestWords:
    def test_a_long_traceback_keeps_its_innermost_frames_and_what_was_raised(self) -> None:
        text = client_failures.traceback_of(_error())
        assert text.startswith('Traceback (most recent call last):\n  File "')
        assert "_deep" in text
        assert "ValueError: wrong" in text
        assert len(json.dumps(text)) < 32 * 1024
        assert client_failures.exception_line(text).startswith("ValueError: wrong")

    def test_most_of_many_tracebacks_are_shortened_to_a_line(self) -> None:
        text = client_failures.traceback_of(_error())
        shortened = client_failures.shorten_tracebacks(dict.fromkeys(range(100), text), 3)
        assert [client for client, text_of_client in shortened.items() if "\n" in text_of_client] == list(
            range(client_failures.MAX_TRACEBACKS - 3)
        )
        assert shortened[99] == client_failures.exception_line(text)

    def test_what_a_round_lacked(self) -> None:
        plan = RoundPlan(3, np.arange(6), np.ones(6, dtype=np.int64), too_slow=np.arange(6, 8))
        assert client_failures.describe_missing_updates(3, 5, _facts(6, dropped=2, broken=1), plan) == (
            "3 of the 5 updates that it needs; 8 clients were selected, 2 dropped out, 1 sent non-finite updates, "
            "2 were too slow"
        )

    def test_who_was_first_and_who_is_left(self) -> None:
        text = client_failures.describe_lost_round(
            5, [_facts(6, dropped=4)] * 3, "2 of the 5 updates", clients=8, eligible=6
        )
        assert text == (
            "round 5 was lost 3 times: 2 of the 5 updates. Client 0 was the first to drop out: KeyError: 'x'. "
            "2 of 8 clients are no longer selected, as their updates were not finite."
        )

    def test_no_client_with_a_finite_update(self) -> None:
        text = client_failures.describe_lost_round(1, [_facts(6, broken=6)] * 3, "0 of the 1", clients=6, eligible=0)
        assert text == "round 1 was lost 3 times: none of the 6 updates was finite"


class TestBounds:
    def test_fifty_thousand_rounds_in_which_all_fail_stay_within_the_limits_of_an_attempt(self) -> None:
        reporter, spy = _reporting()
        for round_ in range(1, 50_001):
            reporter.report(round_, dict.fromkeys(range(20), f"E{round_ % 500}: {round_}"), range(20, 40))
            reporter.report_quarantined(round_, [round_], 3)
            reporter.report_lost_attempt(round_, 1, "too few")
        assert {event["kind"] for event in spy.events} == {
            "client.dropped", "client.broken", "client.quarantined", "round.lost",
        }  # fmt: skip
        assert len(spy.events) == 4 * client_failures.MAX_EVENTS

    def test_a_client_is_reported_once_per_kind_of_error(self, capsys: pytest.CaptureFixture[str]) -> None:
        reporter, spy = _reporting()
        for round_ in range(1, 9):
            kind = "KeyError" if round_ < 5 else "OSError"
            reporter.report(round_, {7: f'Traceback:\n  File "a"\n    x\n{kind}: {round_}'}, ())
        assert [event["step"] for event in spy.of("client.dropped")] == [1, 5]
        assert capsys.readouterr().out.splitlines() == [
            "client 7 dropped out: KeyError: 1 (in round 1)",
            "client 7 dropped out: OSError: 5 (in round 5)",
        ]

    def test_events_name_the_owner_of_the_data_if_there_is_a_name(self) -> None:
        reporter, spy = _reporting("ada", "")
        reporter.report(1, {0: "KeyError: 1", 1: "KeyError: 1"}, [0, 2])
        reporter.report_quarantined(2, [0], 3)
        assert [event.get("name") for event in spy.events] == ["ada", None, "ada", None, "ada"]

    def test_at_most_a_few_a_round(self) -> None:
        reporter, spy = _reporting()
        reporter.report(1, dict.fromkeys(range(100), "KeyError: 1"), range(100, 200))
        reporter.report(2, dict.fromkeys(range(100), "KeyError: 1"), ())
        assert [event["client"] for event in spy.of("client.dropped")] == list(range(10))
        assert len(spy.of("client.broken")) == client_failures.MAX_EVENTS_PER_ROUND


def _failed(run: Run, world: int = 1) -> tuple[Incarnation, dict[str, Any]]:
    """Return what rank 0 reported of its end."""
    incarnation = run.start(world)
    assert set(incarnation.wait()) == {1}, incarnation.output()
    (event,) = run.events("run.failed")
    return incarnation, event


@pytest.mark.slow
class TestRuns:
    @pytest.mark.parametrize("world", [1, 2])
    def test_a_client_that_raises_in_round_3_is_named_and_the_run_continues(self, tmp_path: Path, world: int) -> None:
        run = planted_clients(tmp_path, {"raising": "5", "since": 3, "until": 4})
        done = run.finish(world)
        (event,) = run.events("client.dropped")
        assert (event["step"], event["client"]) == (3, 5)
        assert "LookupError: the disk of owner 5 is gone" in event["traceback"]
        assert "planted_clients.py" in event["traceback"]
        assert run.series("trained") == {n: 7.0 if n == 3 else 8.0 for n in range(1, 7)}
        assert run.series("dropped")[3] == 1.0
        assert "client 5 dropped out: LookupError: the disk of owner 5 is gone (in round 3)" in done.output()

    def test_a_client_that_computes_alone_may_fail_alone(self, tmp_path: Path) -> None:
        """Its stored values, here its running statistics, stay as they were."""
        run = planted_clients(tmp_path, {"raising": "0,5", "since": 3, "until": 3, "batch_norm": True})
        run.finish(1)
        assert {event["client"] for event in run.events("client.dropped")} == {0, 5}

    def test_a_client_that_always_fails_does_not_prevent_stacking_the_others(self, tmp_path: Path) -> None:
        """Not even if it is the one that is tried out."""
        run = planted_clients(tmp_path, {"raising": "0"})
        run.finish(1)
        (started,) = run.events("run.started")
        assert started["alone"] == "", "stacking is not to blame"
        assert set(run.series("trained").values()) == {7.0}

    def test_all_fail_before_the_first_round(self, tmp_path: Path) -> None:
        _, event = _failed(planted_clients(tmp_path, {"raising": EVERYBODY}))
        assert event["exception"] == "ClientsFailed"
        assert event["error"].startswith("all 5 clients that were tried out failed; client 0 failed with:\nTraceback")
        assert event["error"].endswith("LookupError: the disk of owner 0 is gone")

    @pytest.mark.parametrize("world", [1, 2])
    def test_all_fail_in_the_first_round(self, tmp_path: Path, world: int) -> None:
        run = planted_clients(tmp_path, {"raising": EVERYBODY, "later": 1})
        incarnation, event = _failed(run, world)
        assert event["exception"] == "ClientsFailed"
        assert event["error"].startswith("in round 1 all 8 clients failed; client 0 failed with:\nTraceback")
        assert event["error"].endswith("LookupError: the disk of owner 0 is gone")
        assert len(run.events("client.dropped")) == client_failures.MAX_EVENTS_PER_ROUND
        assert len(run.events("round.lost")) == 1, "others would fail, too"
        assert incarnation.output().rstrip().endswith("LookupError: the disk of owner 0 is gone")
        assert not run.series("loss"), "no round came to anything"

    def test_all_fail_later(self, tmp_path: Path) -> None:
        _, event = _failed(planted_clients(tmp_path, {"raising": EVERYBODY, "since": 4}))  # one was tried out
        assert event["error"].startswith("in round 3 all 8 clients failed, 3 times in a row; client 0 failed with:\n")

    def test_a_client_without_finite_updates_is_excluded_after_three(self, tmp_path: Path) -> None:
        run = planted_clients(tmp_path, {"nan": "5"})
        run.finish(1)
        assert [event["step"] for event in run.events("client.broken")] == [1, 2, 3]
        (event,) = run.events("client.quarantined")
        assert (event["step"], event["client"], event["updates"]) == (3, 5, 3)
        assert [run.series("rejected")[n] for n in range(1, 7)] == [1, 1, 1, 0, 0, 0]
        assert set(run.series("trained").values()) == {7.0}

    def test_it_stays_excluded_after_a_resume(self, tmp_path: Path) -> None:
        run = planted_clients(tmp_path, {"nan": "5"})
        run.finish(1)
        run.write(rounds=8)
        run.finish(1, resume="step-6")
        assert sorted(run.series("trained")) == list(range(1, 9))
        assert run.events("client.broken") == []
        assert set(run.series("trained").values()) == {7.0}

    def test_nobody_comes_to_numbers(self, tmp_path: Path) -> None:
        _, event = _failed(planted_clients(tmp_path, {"nan": EVERYBODY}))
        assert event["exception"] == "QuorumLost"
        assert event["error"] == "round 1 was lost 3 times: none of the 8 updates was finite"

    def test_some_raise_and_the_others_come_to_no_numbers(self, tmp_path: Path) -> None:
        """Until nobody is left whom to ask."""
        run = planted_clients(tmp_path, {"nan": "0,1,2,3", "raising": "4,5,6,7"})
        _, event = _failed(run)
        assert event["error"] == (
            "round 1 was lost 3 times: 0 of the 1 updates that it needs; 8 clients were selected, 4 dropped out, "
            "4 sent non-finite updates. Client 4 was the first to drop out: LookupError: the disk of owner 4 is gone. "
            "4 of 8 clients are no longer selected, as their updates were not finite."
        )

    @pytest.mark.parametrize("world", [1, 2])
    def test_a_quorum_that_is_lost_three_times_ends_it(self, tmp_path: Path, world: int) -> None:
        deadline = {"quorum": 0.75, "quantile": 1.0}
        run = planted_clients(tmp_path, {"raising": "5,6,7", "since": 2}, pace="deadline", deadline=deadline)
        incarnation, failure = _failed(run, world)
        assert failure["exception"] == "QuorumLost"
        assert "was lost 3 times: " in failure["error"]
        assert "of the 6 updates that it needs; 7 clients were selected, 3 dropped out" in failure["error"]
        assert "Client 5 was the first to drop out: LookupError: the disk of owner 5 is gone." in failure["error"]
        assert [event["attempt"] for event in run.events("round.lost")] == [1, 2, 3]
        assert {event["client"] for event in run.events("client.dropped")} == {5, 6, 7}
        assert "QuorumLost: round 2 was lost" in incarnation.output().splitlines()[-1]
