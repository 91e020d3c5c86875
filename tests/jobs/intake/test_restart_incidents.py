"""Test restarts in place: each is a separate incident, once, bounded, with a verdict and no post-mortem."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from jobs import restart_incidents
from jobs.intake import reports
from jobs.models import Attempt, Incident
from jobs.postmortem import incidents
from portal.models import User
from tests.jobs.pages.reading import text
from tests.jobs.postmortem.failed_attempts import RAISED, running, write
from tests.jobs.reporting import Spooled, post
from tests.lab import bearer, signed_in

pytestmark = pytest.mark.django_db
ENDED = {
    "rank": 1,
    "exit_code": 1,
    "signal": None,
    "failure": "exception",
    "error": "KeyError: 'label'",
    "why": "exception",
}


@pytest.fixture
def attempt(mira: User, runs: Path) -> Attempt:
    return running(mira, runs)


def report_ends(attempt: Attempt, *ends: dict[str, Any], uid: str = "") -> None:
    launcher = Spooled(rank=-1, uid=uid)
    for item in ends:
        launcher.add_event(restart_incidents.ENDED, time=timezone.now().timestamp(), **{**ENDED, **item})
    reports.ingest(attempt.pk, post(launcher))


def test_a_restart_in_place_is_an_incident(attempt: Attempt, runs: Path, mira: User) -> None:
    write(attempt, runs, "0.1.log", RAISED)
    write(attempt, runs, "1.0.log", "step 200 loss 1.0\n")
    report_ends(attempt, {"incarnation": 0, "restarting": True})
    incident = Incident.objects.get()
    assert (incident.incarnation, incident.project, incident.due_at is not None) == (0, attempt.job.project, True)
    assert incidents.diagnose(incident.pk)
    incident.refresh_from_db()
    assert (incident.cause, incident.rank, incident.is_final) == ("program.exception", 1, False)
    # The attempt goes on for days: it is diagnosed once more, not each minute.
    assert incident.due_at is not None
    assert incident.due_at - incident.at > timedelta(minutes=10)
    client = signed_in(mira)
    path = f"/jobs/{attempt.job_id}/attempts#attempt-1"
    for query in ("", "?attempt=1"):
        answer = client.get(f"/jobs/{attempt.job_id}/postmortem{query}", follow=True)
        assert answer.redirect_chain == [(path, 302)]
        assert "Attempt 1 has no post-mortem: it restarted in place." in text(answer)
    assert client.get(f"/jobs/{attempt.job_id}/postmortem?attempt=2").status_code == 404
    refused = bearer(mira).get(f"/api/v1/jobs/{attempt.job_id}/postmortem")
    assert refused.status_code == 404
    assert "Attempt 1 restarted in place: its incidents are in GET /api/v1/postmortems." in refused.json()["detail"]
    assert "KeyError" in text(client.get(f"/jobs/{attempt.job_id}/attempts"))
    assert "restarted in place" in text(client.get("/postmortems"))
    Incident.objects.update(at=timezone.now() - timedelta(minutes=12), due_at=timezone.now())
    assert incidents.diagnose(incident.pk)
    incident.refresh_from_db()
    assert (incident.is_final, incident.due_at) == (True, None)


@pytest.mark.parametrize(
    "end",
    [
        {"incarnation": 0, "restarting": False},
        {"incarnation": 0},
        {"incarnation": 0, "restarting": True, "why": "joined"},
        {"restarting": True},
        {"incarnation": "0", "restarting": True},
        {"incarnation": -1, "restarting": True},
        {"incarnation": 2**40, "restarting": True},
    ],
)
def test_what_is_none(attempt: Attempt, end: dict[str, Any]) -> None:
    report_ends(attempt, end)
    assert not Incident.objects.exists()


def test_is_counted_once_however_often_and_not_without_end(attempt: Attempt) -> None:
    for uid in ("a" * 16, "b" * 16):  # two launchers may report the same
        report_ends(attempt, {"incarnation": 0, "restarting": True}, uid=uid)
    assert Incident.objects.count() == 1
    report_ends(attempt, *({"incarnation": n, "restarting": True} for n in range(90)), uid="c" * 16)
    assert Incident.objects.count() == restart_incidents.MAX_INCIDENTS


def test_the_jobs_clock_is_not_believed(attempt: Attempt) -> None:
    launcher = Spooled(rank=-1).add_event(
        restart_incidents.ENDED, time=4e9, **{**ENDED, "incarnation": 0, "restarting": True}
    )
    reports.ingest(attempt.pk, post(launcher))
    launcher = Spooled(rank=-1, uid="d" * 16).add_event(
        restart_incidents.ENDED, time=5.0, **{**ENDED, "incarnation": 1, "restarting": True}
    )
    reports.ingest(attempt.pk, post(launcher))
    now = timezone.now()
    assert Incident.objects.count() == 2
    assert all(attempt.created_at <= incident.at <= now for incident in Incident.objects.all())
