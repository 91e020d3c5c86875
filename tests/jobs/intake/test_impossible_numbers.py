"""Test numbers that no run could have measured: a job may report them, and nothing acts on them."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
from django.utils import timezone

from jobs.disk.prepare import grace_of
from jobs.intake import reports
from jobs.models import Checkpoint, Client, Event, Round
from jobs.rounds import unpack
from tests.jobs.reporting import Spooled, attempt_of, job_of, post
from tests.lab import bearer, signed_in, sysadmin
from training.federation.tables import CLIENT_COLUMNS, ROUND_COLUMNS, RoundTable
from vigil_core import untrusted

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(
    ("seconds", "grace"),
    [(10.0, 50), (1e6, 30 + 2 * 120), (1e9, 30), (1e300, 30), (-5.0, 30), ("1e9", 30)],
)
def test_a_write_cannot_take_longer_than_its_attempt_has_run(seconds: object, grace: int) -> None:
    attempt = attempt_of(started_at=timezone.now() - timedelta(seconds=119, milliseconds=500))
    report = Spooled().add_event("checkpoint.committed", step=100, generation=1, bytes=1, seconds=seconds)
    reports.ingest(attempt.pk, post(report))
    assert grace_of(attempt) == pytest.approx(grace, abs=2)


def test_the_site_caps_the_grace_of_a_job_that_has_run_for_long(settings: Any) -> None:
    settings.VIGIL_MAX_GRACE_SECONDS = 600
    attempt = attempt_of(started_at=timezone.now() - timedelta(days=3))
    report = Spooled().add_event("checkpoint.committed", step=100, generation=1, bytes=1, seconds=1e6)
    reports.ingest(attempt.pk, post(report))
    assert grace_of(attempt) == 600


def test_a_checkpoint_from_the_future_is_not_the_newest_for_ever() -> None:
    attempt = attempt_of(started_at=timezone.now() - timedelta(hours=1))
    stream = Spooled().add_event("checkpoint.committed", time=8e9, step=100, generation=1, bytes=1, seconds=900.0)
    reports.ingest(attempt.pk, post(stream))
    stream.add_event("checkpoint.committed", time=time.time() + 5, step=200, generation=1, bytes=1, seconds=10.0)
    reports.ingest(attempt.pk, post((stream, 1, 2)))
    assert grace_of(attempt) == 50
    now = timezone.now()
    assert all(at <= now for at in Checkpoint.objects.values_list("created_at", flat=True))
    assert all(at <= now for at in Event.objects.values_list("time", flat=True))


def test_an_estimate_beyond_all_calendars_is_none() -> None:
    """A step far below an absurd number of steps is no reason for a list of jobs to fail."""
    attempt = attempt_of(job_of(), started_at=timezone.now())
    stream = (
        Spooled().add_event("run.started", steps=2**53 - 1, start_step=0).add_event("progress", step=1, steps=2**53 - 1)
    )
    reports.ingest(attempt.pk, post(stream))
    type(attempt).objects.filter(pk=attempt.pk).update(last_report_at=timezone.now() - timedelta(seconds=5))
    stream.add_event("progress", step=2, steps=2**53 - 1)
    reports.ingest(attempt.pk, post((stream, 2, 3)))
    visitor_of = sysadmin()
    visitor = signed_in(visitor_of)
    for page in ("/", "/jobs", f"/jobs/{attempt.job_id}"):
        assert visitor.get(page).status_code == 200, page
    assert bearer(visitor_of).get("/api/v1/jobs").status_code == 200


def test_rounds_that_took_longer_than_a_year_have_no_time() -> None:
    job = job_of()
    type(job).objects.filter(pk=job.pk).update(kind="federated")
    attempt = attempt_of(job, started_at=timezone.now())
    rounds = {name: np.zeros(1, kind) for name, kind in ROUND_COLUMNS.items()}
    clients = {name: np.zeros(2, kind) for name, kind in CLIENT_COLUMNS.items()}
    rounds["round"][:] = clients["round"][:] = 1
    rounds["seconds"][:] = 3e38
    clients["client"][:], clients["seconds"][:] = (0, 1), (3e38, 2.0)
    report = Spooled().add_event("round.clients", **RoundTable(rounds, clients).pack())
    reports.ingest(attempt.pk, post(report))
    assert Round.objects.get().seconds is None
    assert np.isnan(unpack(bytes(Round.objects.get().named))["seconds"][0])
    assert list(Client.objects.order_by("number").values_list("timed", "seconds_sum")) == [(0, 0.0), (1, 2.0)]


def test_a_duration_is_at_most_a_year() -> None:
    assert untrusted.duration(86_400) == 86_400.0
    assert untrusted.duration(1e9) is None
    assert untrusted.duration(True) is None
