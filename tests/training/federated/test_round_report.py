"""Test that reports of a long federation with many clients stay within an attempt's limits without truncation."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import vigil_report
from tests.training.federated.in_process import RecordingReporter as Reporter
from training.federated import client_failures, round_report
from training.federated.coverage import CoverageLog
from training.federated.evaluation import Evaluation
from training.federated.messages import Traffic
from training.federated.round_report import BROKEN, DROPPED, LATE, REJECTED, TRAINED, RoundReport, RoundReporter
from training.federation.tables import CLIENT_COLUMNS, NAMED, ROUND_COLUMNS, ROUNDS, Columns, RoundTable
from training.reporting.spool import read_spool

CLIENTS = 100_000
SERIES, EVENTS = 1_000, 50_000
"""Of an attempt, by the portal's intake."""
MAX_EVENTS = 20_000
ERRORS = ("KeyError: 1", "OSError: 5")


NAMELESS: Any = SimpleNamespace(
    divided=SimpleNamespace(names=(), validation_sizes=np.full(CLIENTS, 10)),
    config=SimpleNamespace(client_lr_schedule="constant"),
)
"""All that is asked of a federation whose clients have no names."""


class Clock:
    """Replaces the module `time`."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(round_report, "time", created := Clock())
    return created


def coverage() -> CoverageLog:
    """Return the coverage of the maximum number of clients and data, none of which has counted."""
    return CoverageLog(np.full(CLIENTS, 2**31))


def a_round(draw: np.random.Generator, selected_clients: int) -> RoundReport:
    """Return a report with numbers that do not compress, and clients with every kind of problem."""
    clients = draw.choice(CLIENTS, selected_clients, replace=False)
    states = draw.choice([TRAINED, LATE, DROPPED, REJECTED, BROKEN], selected_clients, p=[0.8, 0.05, 0.05, 0.05, 0.05])
    dropped = clients[states == DROPPED].tolist()
    sizes = draw.integers(10**5, 10**6, selected_clients)
    return RoundReport(
        clients=clients,
        selected=clients,
        losses=draw.lognormal(size=selected_clients),
        states=states,
        failed={client: ERRORS[client % 2] for client in dropped},
        samples=selected_clients,
        loss=draw.lognormal(),
        compute_seconds=0.1,
        wait_seconds=0.1,
        transfer_seconds=0.1,
        traffic=Traffic(clients, sizes, sizes),
        client_seconds=draw.lognormal(size=selected_clients),
        seconds=draw.lognormal(),
    )


def judged(draw: np.random.Generator, accuracies: NDArray[np.float64]) -> Evaluation:
    """Return an evaluation with these accuracies, but that the model is worst for a client by chance."""
    by_client = accuracies.copy()
    by_client[draw.integers(CLIENTS)] = 0.0
    return Evaluation({"loss": draw.lognormal(), "accuracy": draw.random()}, {"accuracy": by_client})


def test_the_largest_event_is_reported_whole(clock: Clock, tmp_path: Path) -> None:
    """It reports as many rounds as one event does, the last few of 10,000 clients: it has room, and can be read."""
    reporter = vigil_report.Stream(tmp_path, rank=0, incarnation=0)
    round_reporter, draw = RoundReporter(reporter, NAMELESS, coverage()), np.random.default_rng(0)
    rounds = [a_round(draw, 10_000 if number > ROUNDS - 3 else 400) for number in range(1, ROUNDS + 1)]
    accuracies = draw.random(CLIENTS)
    for number, report in enumerate(rounds, start=1):
        round_reporter.report_round(number, report, judged(draw, accuracies))
    round_reporter.close()
    reporter.close()
    (file,) = (tmp_path / "spool").iterdir()
    _, batches, _ = read_spool(file)
    (event,) = (event for batch in batches for event in batch.events if event["kind"] == "round.clients")
    assert len(json.dumps(event)) <= vigil_report.EVENT_BYTES
    assert "truncated" not in event
    table = RoundTable.unpack(event)
    assert table.rounds["round"].tolist() == list(range(1, ROUNDS + 1))
    assert table.rounds["trained"].tolist() == [int((report.states == TRAINED).sum()) for report in rounds]
    assert NAMED / 2 < len(table.clients["client"]) <= NAMED
    assert (table.clients["state"] != TRAINED).all(), "those in trouble come first"


def test_a_client_that_few_samples_evaluate_is_not_the_worst(clock: Clock) -> None:
    """Neither by name nor in the spread over clients, unless there are no others."""

    def found(*evaluated: int) -> tuple[int, float]:
        reporter, divided = Reporter(), SimpleNamespace(names=(), validation_sizes=np.array(evaluated))
        federation: Any = SimpleNamespace(**{**vars(NAMELESS), "divided": divided})
        round_reporter = RoundReporter(reporter, federation, coverage())
        accuracies = Evaluation({"accuracy": 0.5}, {"accuracy": np.array([0.0, 0.4, 0.9])})
        draw = np.random.default_rng(0)
        report = replace(a_round(draw, 3), clients=np.arange(3), selected=np.arange(3))
        round_reporter.report_round(1, report, accuracies)
        round_reporter.report_evaluation(1, accuracies)
        round_reporter.close()
        (event,) = reporter.of("round.clients")
        return int(RoundTable.unpack(event).rounds["worst"][0]), reporter.series["client_accuracy_min"][1]

    assert found(9, 10, 11) == (1, 0.4)
    assert found(10, 10, 10) == (0, 0.0)
    assert found(1, 2, 9) == (-1, 0.0)


def test_whatever_numbers_there_are_rounds_are_whole() -> None:
    """As many clients are named as there is room for."""
    draw = np.random.default_rng(0)

    def columns(kinds: dict[str, str], rows: int) -> Columns:
        return {name: np.frombuffer(draw.bytes(rows * np.dtype(kind).itemsize), kind) for name, kind in kinds.items()}

    rounds, clients = columns(ROUND_COLUMNS, ROUNDS), columns(CLIENT_COLUMNS, NAMED)
    clients |= {"round": draw.choice(rounds["round"], NAMED), "state": draw.integers(5, size=NAMED)}
    event = RoundTable(rounds, clients).pack()
    assert len(json.dumps({"kind": "round.clients", "time": 2**53, "step": 2**53, **event})) <= vigil_report.EVENT_BYTES
    table = RoundTable.unpack(event)
    assert all(table.rounds[name].tobytes() == values.tobytes() for name, values in rounds.items())
    assert 100 < len(table.clients["client"]) < 300


@pytest.mark.parametrize("rounds", [3_000, pytest.param(50_000, marks=[pytest.mark.slow, pytest.mark.exhaustive])])
def test_however_long_it_is_events_are_few(rounds: int, clock: Clock) -> None:
    """A second a round, of which the most events come: one each at first, then ever fewer."""
    round_reporter, draw = RoundReporter(reporter := Reporter(), NAMELESS, coverage()), np.random.default_rng(0)
    some = [a_round(draw, 10) for _ in range(50)]
    for number in range(1, rounds + 1):
        clock.now += 1.0
        round_reporter.report_round(number, some[number % 50], None)
    round_reporter.close()
    tables = [RoundTable.unpack(event) for event in reporter.of("round.clients")]
    assert np.concatenate([table.rounds["round"] for table in tables]).tolist() == list(range(1, rounds + 1))
    assert 2_500 <= len(tables) <= 2_501 + 2_500 * math.log(rounds / 2_500)
    assert 2_500 * (1 + math.log(1_000_000 / 2_500)) < MAX_EVENTS, "for the longest run that can be requested"
    for kind in ("client.dropped", "client.broken"):
        assert len(reporter.of(kind)) <= client_failures.MAX_EVENTS
    assert len(reporter.events) < EVENTS / 2
    assert len(reporter.series) < SERIES / 10


def test_rounds_of_milliseconds_wait_for_each_other(clock: Clock) -> None:
    """No more than so many at once, however rare the events have become."""
    round_reporter, draw = RoundReporter(reporter := Reporter(), NAMELESS, coverage()), np.random.default_rng(0)
    clock.now = 30 * 86_400.0
    report: Any = a_round(draw, 10)
    for number in range(1, 2 * ROUNDS + 2):
        clock.now += 0.01
        round_reporter.report_round(number, report, None)
    tables = [RoundTable.unpack(event) for event in reporter.of("round.clients")]
    assert [len(table.rounds["round"]) for table in tables] == [1, ROUNDS, ROUNDS]
