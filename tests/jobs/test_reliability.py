"""The time between failures, told from attempts."""

from __future__ import annotations

import tomllib
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from jobs import reliability
from jobs.disk.prepare import run_toml
from jobs.models import Attempt, Event
from jobs.spec import JobSpec
from tests.lab import a_job, a_project, person

pytestmark = pytest.mark.django_db


def ran(
    hours: float, *, nodes: int = 1, cause: str = "completed", restarts: int = 0, grown: int = 0, ago_days: float = 2
) -> None:
    """`grown`: how many of its restarts took in more nodes, and had lost none."""
    began = timezone.now() - timedelta(days=ago_days)
    ended: dict[str, Any] = {"started_at": began, "ended_at": began + timedelta(hours=hours), "cause": cause}
    job = a_job(person(f"ada{Attempt.objects.count()}"), a_project())
    Attempt.objects.filter(job=job).update(nodes=[f"n{k}" for k in range(nodes)], incarnation=restarts, **ended)
    attempt = Attempt.objects.get(job=job)
    for number in range(restarts):
        why = {"why": "joined"} if number < grown else {"why": "signal", "rank": 0, "failure": "signal"}
        told = {"incarnation": number, "restarting": True, **why}
        Event.objects.create(attempt=attempt, kind="incarnation.ended", rank=-1, incarnation=0, time=began, data=told)


def test_nothing_is_said_before_enough_is_seen() -> None:
    assert reliability.hours_between_failures(1) is None
    ran(2.0, nodes=4, cause="node_fail")
    assert reliability.hours_between_failures(1) is None


def test_node_hours_over_failures_and_over_the_nodes_asked_for() -> None:
    ran(10.0, nodes=10)
    ran(10.0, nodes=2, cause="node_fail")
    ran(6.0, nodes=1, cause="lost", restarts=2)
    ran(1000.0, nodes=8, cause="node_fail", ago_days=50)  # long ago
    expected = (100 + 20 + 6 + reliability.PRIOR_HOURS) / (4 + 1)
    assert reliability.hours_between_failures(1) == pytest.approx(expected)
    assert reliability.hours_between_failures(5) == pytest.approx(expected / 5)


def test_a_restart_that_took_in_more_nodes_is_no_failure() -> None:
    ran(100.0, restarts=3, grown=2)
    assert reliability.hours_between_failures(1) == pytest.approx((100 + reliability.PRIOR_HOURS) / (1 + 1))


def test_a_trainer_is_told() -> None:
    spec = JobSpec.parse({"name": "x", "kind": "distributed", "run": {"recipe": "language"}})
    assert tomllib.loads(run_toml(spec, {}, mtbf_hours=12.5))["launch"]["mtbf_hours"] == 12.5
    assert "mtbf_hours" not in tomllib.loads(run_toml(spec, {}))["launch"]
