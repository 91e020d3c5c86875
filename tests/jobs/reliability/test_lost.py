"""Test what a failure cost, and how long it took until ranks trained again: each second is counted once."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from jobs.failures.counting import count as count_once
from jobs.gathering import postmortem as documents
from jobs.models import Attempt, Failure, Incident, Job
from tests.jobs.reliability.lab import count, failed, ran, trains
from tests.lab import a_checkpoint
from tests.portal.series import write

pytestmark = pytest.mark.django_db


def test_what_it_cost_and_how_long_it_took() -> None:
    """It saved an hour before the end; the next attempt had its nodes for ten minutes before it trained."""
    first = ran(5.0, nodes=["a", "b"], cause="scheduler.node_fail", node="a")
    assert first.ended_at is not None
    saved = a_checkpoint(first.job, 100, attempt=first, created_at=first.ended_at - timedelta(hours=1))
    count()
    before = Failure.objects.get()
    assert (before.lost_node_s, before.recover_s) == (2 * 3600, None)
    assert (before.node, before.is_settled) == ("a", True)
    Failure.objects.update(is_settled=False)
    second = ran(4.0, nodes=["c", "b"], ago=42.0, job=first.job)
    Attempt.objects.filter(pk=second.pk).update(resume_from=saved)
    trains(second, 600)
    count()
    after = Failure.objects.get()
    assert after.lost_node_s == pytest.approx(2 * (3600 + 600))
    assert after.lost_gpu_s == pytest.approx(16 * (3600 + 600))
    assert after.recover_s == pytest.approx(3600 + 600)


def test_it_is_counted_again_until_the_next_attempt_trains() -> None:
    first = ran(5.0, ago=6, cause="scheduler.node_fail")
    second = ran(0.5, ago=0.9, job=first.job)
    Attempt.objects.filter(pk=second.pk).update(ended_at=None, closed_at=None)
    count()
    assert not Failure.objects.get().is_settled
    trains(second, 60)
    count()
    assert Failure.objects.get().is_settled
    assert Failure.objects.get().recover_s == pytest.approx(0.1 * 3600 + 60)


def test_a_restart_in_place_lost_what_came_after_the_checkpoint() -> None:
    attempt = ran(5.0)
    assert attempt.started_at is not None
    trains(attempt, 30)
    at = attempt.started_at + timedelta(hours=2)
    failed(attempt, "gpu.ecc", at=at, incarnation=0)
    a_checkpoint(attempt.job, 100, attempt=attempt, created_at=at - timedelta(minutes=10))
    trains(attempt, 2 * 3600 + 20, incarnation=1)
    count()
    found = Failure.objects.get()
    assert (found.lost_node_s, found.recover_s) == (pytest.approx(620), pytest.approx(20))
    assert found.is_interruption


def test_from_the_last_step_to_the_end_that_was_noticed() -> None:
    attempt = ran(5.0)
    assert attempt.ended_at is not None
    end = attempt.ended_at.timestamp()
    for step in range(1, 51):
        write("step_seconds", (0, [(step, 6.0)]), owner=("attempt", attempt.pk), time=end - 400 + 6 * step)
    failed(attempt, "collective.timeout")
    count()
    assert Failure.objects.get().detect_s == pytest.approx(100, abs=1e-3)


def test_several_in_one_attempt_are_counted_separately() -> None:
    """It trained for two hours, restarted within 20 s and trained to the end; the next began after ten minutes."""
    attempt = ran(5.0, cause="gpu.off_bus")
    assert attempt.started_at is not None
    trains(attempt, 30)
    failed(attempt, "gpu.ecc", at=attempt.started_at + timedelta(hours=2), incarnation=0)
    trains(attempt, 2 * 3600 + 20, incarnation=1)
    second = ran(1.0, ago=42.0, job=attempt.job, cause="gpu.nvlink")
    trains(second, 600)
    count()
    lost = dict(Failure.objects.values_list("cause", "lost_node_s"))
    assert lost == {
        "gpu.ecc": pytest.approx(2 * 3600 - 30 + 20),
        "gpu.off_bus": pytest.approx(3 * 3600 - 20 + 600),
        "gpu.nvlink": pytest.approx(3600 - 600),
    }


@pytest.mark.parametrize("seed", range(12))
def test_what_a_jobs_incidents_cost_is_no_more_than_was_allocated(seed: int) -> None:
    chance = random.Random(seed)
    job: Job | None = None
    allocated_s = 0.0
    for number in range(4):
        attempt = ran(3.0, ago=60 - 4 * number, job=job)
        job, allocated_s = attempt.job, allocated_s + 3 * 3600
        assert attempt.started_at is not None
        at = 0.0
        for incarnation in range(chance.randint(1, 4)):
            at += chance.uniform(1, 600)
            if chance.random() < 0.7:
                trains(attempt, at, incarnation=incarnation)
            at += chance.uniform(1, 1500)
            when = attempt.started_at + timedelta(seconds=at)
            if chance.random() < 0.4:
                a_checkpoint(job, number * 10 + incarnation, attempt=attempt, created_at=when - timedelta(seconds=30))
            if chance.random() < 0.8:
                failed(attempt, "gpu.ecc", at=when, incarnation=incarnation)
        if chance.random() < 0.8:
            failed(attempt, "gpu.off_bus")
    count()
    lost = sum(Failure.objects.values_list("lost_node_s", flat=True))
    assert Failure.objects.count() == Incident.objects.count()
    assert 0 < lost <= allocated_s


@pytest.mark.parametrize("started", [False, True])
def test_a_next_attempt_that_never_ran_is_none(started: bool) -> None:
    """It was withdrawn in the queue, as a revision of the verdict does, or by a person."""
    first = ran(5.0, cause="program.exception")
    second = ran(1.0, ago=40.0, job=first.job)
    if not started:
        Attempt.objects.filter(pk=second.pk).update(started_at=None, state="cancelled")
    count()
    assert Failure.objects.get().is_interruption is started


def test_while_the_next_attempt_waits_nothing_is_read(django_assert_max_num_queries: Any) -> None:
    """It may wait for days, and each count costs several queries and a write."""
    first = ran(5.0, ago=6, cause="program.exception")
    second = ran(0.5, ago=0.9, job=first.job)
    Attempt.objects.filter(pk=second.pk).update(started_at=None, ended_at=None, closed_at=None)
    count()
    assert Failure.objects.get().is_interruption, "it is to go on"
    assert not Failure.objects.get().is_settled
    with django_assert_max_num_queries(3):
        assert count_once() == 0
    Attempt.objects.filter(pk=second.pk).update(ended_at=second.ended_at, closed_at=second.ended_at)
    count()
    assert not Failure.objects.get().is_interruption, "it was withdrawn"
    assert Failure.objects.get().is_settled


def test_what_has_not_changed_is_not_written() -> None:
    first = ran(5.0, ago=6, cause="scheduler.node_fail")
    second = ran(0.5, ago=0.9, job=first.job)
    Attempt.objects.filter(pk=second.pk).update(ended_at=None, closed_at=None)
    count()
    assert not Failure.objects.get().is_settled
    with CaptureQueriesContext(connection) as queries:
        count_once()
    assert not [
        item["sql"] for item in queries if "jobs_failure" in item["sql"] and not item["sql"].startswith("SELECT")
    ]


def test_the_last_step_is_that_of_the_ranks_that_failed() -> None:
    """The next incarnation did the same steps again, long after."""
    attempt = ran(5.0)
    assert attempt.started_at is not None
    at = attempt.started_at + timedelta(hours=1)
    for incarnation, began in ((0, at.timestamp() - 100), (1, at.timestamp() + 50)):
        for step in range(1, 11):
            reports = (0, [(step, 6.0)])
            write(
                "step_seconds", reports, owner=("attempt", attempt.pk), incarnation=incarnation, time=began + 6 * step
            )
    failed(attempt, "gpu.ecc", at=at, incarnation=0)
    count()
    assert Failure.objects.get().detect_s == pytest.approx(40, abs=1e-3)


def test_a_post_mortem_shows_the_same() -> None:
    first = ran(5.0, nodes=["a", "b"], gpus=4, cause="scheduler.node_fail")
    assert first.ended_at is not None
    write("loss", (0, [(7, 2.0)]), owner=("attempt", first.pk), time=first.ended_at.timestamp() - 40)
    trains(first, 90)
    saved = a_checkpoint(first.job, 5, attempt=first, created_at=first.ended_at - timedelta(minutes=20))
    second = ran(1.0, nodes=["a", "b", "c"], ago=42.0, job=first.job)
    Attempt.objects.filter(pk=second.pk).update(resume_from=saved)
    trains(second, 600)
    count()
    counted = Failure.objects.get()
    document = documents.load(first.job, 1)
    assert document is not None
    cost = document.cost
    assert cost.detect_seconds == counted.detect_s == pytest.approx(40)
    assert cost.resume_seconds == counted.recover_s == pytest.approx(3600 + 600)
    assert cost.lost_seconds == pytest.approx(1200 + 600)
    assert counted.lost_node_s == pytest.approx(2 * 1200 + 3 * 600)
    assert cost.gpu_hours == pytest.approx(counted.lost_gpu_s / 3600)
