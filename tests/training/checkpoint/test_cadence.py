"""Test how often to save: against the best constant interval, in simulated runs with failures (protocols.md §7)."""

from __future__ import annotations

import itertools
import math

import pytest

from tests.training.checkpoint.simulating import least_loss, lost
from training.checkpoint import cadence
from training.checkpoint.cadence import Cadence, Mtbf, best_interval, next_interval, overhead

HOUR = 3600.0


GRID = [(0.5, 1), (0.5, 24), (10, 1), (10, 24), (60, 1), (60, 24), (60, 7 * 24)]


@pytest.mark.parametrize(("cost", "hours"), GRID)
def test_loses_hardly_more_than_the_best_interval(cost: float, hours: float) -> None:
    assert lost(cost, hours * HOUR, failures=300) <= 1.05 * least_loss(cost, hours * HOUR)


def test_the_best_interval_costs_least() -> None:
    for cost, tau in itertools.product((0.1, 1, 100), (HOUR, 1000 * HOUR)):
        best = best_interval(cost, tau)
        assert overhead(best, cost, tau) == pytest.approx(math.sqrt(2 * cost / tau))
        assert all(overhead(best * factor, cost, tau) > overhead(best, cost, tau) for factor in (0.5, 0.9, 1.1, 2))


def test_changes_little_at_once_and_never_outruns_the_write() -> None:
    about = {"mtbf_seconds": 2 * HOUR, "write": 1.0}
    assert next_interval(60, cost=1, **about) == 120
    assert next_interval(110, cost=1, **about) == 120
    assert next_interval(1000, cost=1, **about) == 500
    assert next_interval(60, cost=1, mtbf_seconds=50, write=40) == 80


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def _steps(found: Cadence, clock: Clock, count: int, seconds: float, *, saving: bool = False) -> None:
    for _ in range(count):
        found.is_due(1)
        clock.now += seconds
        found.note_step(seconds, saving=saving)


def test_what_replicas_exchange_now_and_then_is_no_cost_of_a_save() -> None:
    found = Cadence(10, Mtbf(HOUR, "portal"))
    for step in range(40):
        exchange = 4.0 if step % 4 == 3 else 0.0
        found.note_step(0.5 + exchange, saving=step >= 20, exchange=exchange)
    about = found.note_written(stall=0.1, write=30.0)
    assert about is not None
    assert about["cost_seconds"] == pytest.approx(0.1)
    assert about["interval_seconds"] == pytest.approx(10 * 1.5 + 0.1), "but it is a part of the time between two"


def test_the_cost_is_the_stall_and_what_the_steps_were_slower() -> None:
    clock = Clock()
    found = Cadence("auto", Mtbf(HOUR, "portal"), clock=clock)
    _steps(found, clock, 10, 0.5)
    assert not found.is_due(11)
    clock.now = 59.8  # nearer to 60 than the end of the next step
    assert found.is_due(12)
    found.note_begun()
    assert not found.is_due(13)
    _steps(found, clock, 3, 0.7, saving=True)
    report = found.note_written(stall=0.2, write=2.0)
    assert report is not None
    assert report["cost_seconds"] == pytest.approx(0.2 + 3 * 0.2)
    assert (report["source"], report["mtbf_seconds"]) == ("portal", HOUR)
    assert report["best_interval_seconds"] == pytest.approx(math.sqrt(2 * 0.8 * HOUR))
    assert report["interval_seconds"] == found.interval == pytest.approx(math.sqrt(2 * 0.8 * HOUR))
    assert report["overhead_fraction"] == pytest.approx(math.sqrt(2 * 0.8 / HOUR))


def test_a_single_slow_save_changes_nothing_since_the_median_of_five_counts() -> None:
    clock = Clock()
    found = Cadence("auto", Mtbf(HOUR, "portal"), clock=clock)
    _steps(found, clock, 10, 0.5)
    for stall in (1.0, 1.0, 1.0, 100.0, 1.0, 1.0):
        found.note_begun()
        _steps(found, clock, 1, 0.5, saving=True)
        report = found.note_written(stall=stall, write=0.5)
        assert report is not None
    assert report["cost_seconds"] == 1.0


def test_a_configured_interval_is_used_and_its_cost_reported() -> None:
    clock = Clock()
    found = Cadence(10, Mtbf(HOUR, "assumed"), keep_every=25, clock=clock)
    assert [step for step in range(1, 51) if found.is_due(step)] == [10, 20, 25, 30, 40, 50]
    _steps(found, clock, 10, 0.5)
    found.note_begun()
    _steps(found, clock, 1, 0.75, saving=True)
    report = found.note_written(stall=0.25, write=0.5)
    assert report is not None
    assert (report["automatic"], report["interval_seconds"], report["source"]) == (False, 5.5, "assumed")
    assert report["overhead_fraction"] == pytest.approx(0.5 / 5.5 + 5.5 / 2 / HOUR)
    assert report["best_overhead_fraction"] < report["overhead_fraction"]
    assert not any(Cadence(0, Mtbf(HOUR, "assumed")).is_due(step) for step in range(1, 100))


def test_saves_at_every_step_take_most_of_the_time_but_not_more_than_all() -> None:
    clock = Clock()
    found = Cadence(1, Mtbf(HOUR, "assumed"), clock=clock)
    _steps(found, clock, 10, 0.01)
    found.note_begun()
    _steps(found, clock, 1, 0.01, saving=True)
    report = found.note_written(stall=0.09, write=0.1)
    assert report is not None
    assert report["overhead_fraction"] == pytest.approx(0.9, abs=1e-3)


def test_without_steps_to_compare_nothing_is_reported() -> None:
    clock = Clock()
    found = Cadence("auto", Mtbf(HOUR, "portal"), clock=clock)
    _steps(found, clock, 2, 0.5)
    found.note_begun()
    _steps(found, clock, 2, 0.5, saving=True)
    assert found.note_written(stall=0.1, write=1.0) is None
    _steps(found, clock, 10, 0.5)
    found.note_begun()
    assert found.note_written(stall=0.1, write=0.1) is None, "over before the first step was"
    assert found.interval == cadence.FIRST_SECONDS


def test_a_resumed_run_goes_on_with_what_it_knew() -> None:
    clock = Clock()
    found = Cadence("auto", Mtbf(HOUR, "portal"), clock=clock)
    _steps(found, clock, 10, 0.5)
    found.note_begun()
    _steps(found, clock, 1, 0.5, saving=True)
    found.note_written(stall=0.125, write=0.5)
    again = Cadence("auto", Mtbf(HOUR, "portal"), clock=clock)
    again.load_state_dict(found.state_dict())
    assert again.interval == found.interval == 30
    assert again.state_dict() == found.state_dict()
    for nonsense in ({}, {"costs": 3, "interval": -1}, {"costs": ["x", float("nan"), -1], "interval": float("inf")}):
        fresh = Cadence("auto", Mtbf(HOUR, "portal"))
        fresh.load_state_dict(nonsense)
        assert fresh.state_dict() == {"costs": [], "interval": cadence.FIRST_SECONDS}


def test_the_failure_rate_comes_from_the_config_the_portal_or_an_assumption() -> None:
    assert cadence.mtbf(2.0, 5.0, 4) == Mtbf(2 * HOUR, "config")
    assert cadence.mtbf(None, 5.0, 4) == Mtbf(5 * HOUR, "portal")
    assert cadence.mtbf(None, None, 4) == Mtbf(6 * HOUR, "assumed")
    assert cadence.node_count({"GROUP_WORLD_SIZE": "3"}) == 3
    assert cadence.node_count({}) == cadence.node_count({"GROUP_WORLD_SIZE": "x"}) == 1
