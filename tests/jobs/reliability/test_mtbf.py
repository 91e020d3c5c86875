"""Test the mean time between failures that trainers are given."""

from __future__ import annotations

import tomllib

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from jobs.disk.prepare import run_toml
from jobs.models import Attempt, Event
from jobs.reliability import mtbf
from jobs.reliability.mtbf import PRIOR_HOURS
from jobs.spec import JobSpec
from nodes.models import Partition
from tests.jobs.reliability.lab import count, failed, ran

pytestmark = pytest.mark.django_db


def names(number: int, letter: str = "n") -> list[str]:
    return [f"{letter}{k}" for k in range(number)]


def test_nothing_is_claimed_before_enough_is_observed() -> None:
    assert mtbf.hours_between_failures(1) is None
    ran(2.0, nodes=names(4), cause="scheduler.node_fail")
    count()
    assert mtbf.hours_between_failures(1) is None


def test_node_hours_over_failures_and_over_the_requested_nodes() -> None:
    ran(10.0, nodes=names(10))
    ran(10.0, nodes=names(2), cause="scheduler.node_fail")
    again = ran(6.0, cause="gpu.ecc")
    failed(again, "memory.host_oom", incarnation=0)
    ran(1000.0, nodes=names(8), cause="scheduler.node_fail", ago=24 * 80)  # long ago
    count()
    expected = (100 + 20 + 6 + PRIOR_HOURS) / (3 + 1)
    assert mtbf.hours_between_failures(1) == pytest.approx(expected)
    assert mtbf.hours_between_failures(5) == pytest.approx(expected / 5)


def test_what_runs_now_counts_and_what_is_not_counted_yet() -> None:
    attempt = ran(10.0, nodes=names(10))
    assert mtbf.hours_between_failures(1) == pytest.approx((100 + PRIOR_HOURS) / 1)
    count()
    assert mtbf.hours_between_failures(1) == pytest.approx((100 + PRIOR_HOURS) / 1)
    Attempt.objects.filter(pk=attempt.pk).update(is_counted=False, closed_at=None, ended_at=None)
    assert mtbf.hours_between_failures(1) == pytest.approx((100 + 480 + PRIOR_HOURS) / 1, rel=0.03), "and since"


def test_a_programs_end_is_no_interruption_unless_it_went_on() -> None:
    ran(100.0, ago=120, cause="program.exception")
    count()
    assert mtbf.hours_between_failures(1) == pytest.approx(100 + PRIOR_HOURS)
    first = ran(50.0, ago=120, cause="memory.host_oom")
    ran(10.0, ago=60, job=first.job)
    count()
    assert mtbf.hours_between_failures(1) == pytest.approx((160 + PRIOR_HOURS) / 2)


def test_a_partition_is_as_good_as_the_rest_until_it_shows_otherwise() -> None:
    ran(100.0, ago=120, partition="old", cause="gpu.off_bus")
    ran(900.0, ago=1000, nodes=["m0"], partition="new")  # 700 of them within the 30 days
    ran(60.0, ago=100, partition="old", cause="gpu.ecc")
    count()
    everywhere = mtbf.hours_between_failures(1)
    old = mtbf.hours_between_failures(1, partition="old")
    new = mtbf.hours_between_failures(1, partition="new")
    unseen = mtbf.hours_between_failures(1, partition="other")
    assert None not in (everywhere, old, new, unseen)
    assert old == pytest.approx((160 + everywhere) / (2 + 1))
    assert old < everywhere < new  # type: ignore[operator]
    assert unseen == pytest.approx(everywhere)


def test_a_job_that_names_no_partition_runs_in_the_default() -> None:
    Partition.objects.create(name="old", is_default=True)
    ran(100.0, ago=120, cause="gpu.off_bus")
    ran(100.0, ago=120, partition="new")
    count()
    assert mtbf.hours_between_failures(1) == mtbf.hours_between_failures(1, partition="old")
    assert mtbf.hours_between_failures(1) != mtbf.hours_between_failures(1, partition="new")


def test_a_single_query_a_minute_serves_everyone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of jobs of a sweep are prepared at once, while thousands of attempts run."""
    clock = [1e15]
    monkeypatch.setattr(mtbf, "CACHE_S", 60.0)
    monkeypatch.setattr(mtbf, "monotonic", lambda: clock[0])
    ran(100.0, nodes=["a"])
    before = mtbf.hours_between_failures(1)
    ran(100.0, nodes=["a"])
    with CaptureQueriesContext(connection) as queries:
        assert mtbf.hours_between_failures(1, partition="x") == mtbf.hours_between_failures(1, names=["b"]) == before
    assert not queries.captured_queries
    clock[0] += 60
    assert mtbf.hours_between_failures(1) == pytest.approx(200 + PRIOR_HOURS)


def test_named_nodes_have_separate_rates() -> None:
    ran(100.0, ago=120, nodes=["bad"], cause="gpu.off_bus")
    ran(100.0, ago=120, nodes=["bad"], cause="gpu.ecc")
    ran(100.0, ago=120, nodes=["good", "best"])
    count()
    bad, good = (mtbf.hours_between_failures(1, names=[name]) for name in ("bad", "good"))
    assert bad is not None
    assert good is not None
    assert bad < 0.5 * good
    assert mtbf.hours_between_failures(1, names=["new"]) == pytest.approx(mtbf.hours_between_failures(1))


def test_a_trainer_is_informed() -> None:
    spec = JobSpec.parse({"name": "x", "kind": "distributed", "run": {"recipe": "language"}})
    assert tomllib.loads(run_toml(spec, {}, mtbf_hours=12.5))["launch"]["mtbf_hours"] == 12.5
    assert "mtbf_hours" not in tomllib.loads(run_toml(spec, {}))["launch"]
    assert not Event.objects.exists()
