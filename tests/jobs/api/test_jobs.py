"""Test one job over REST: change, cancel, resume, delete; and that others cannot learn of it."""

import json
from datetime import timedelta

import pytest
from django.utils import timezone

from jobs.models import Event, Job
from portal.models import AuditEntry
from tests import lab
from tests.lab import a_checkpoint, send

pytestmark = pytest.mark.django_db
JOBS = "/api/v1/jobs"


def test_progress_of_a_running_job(client, mira, project):
    ago = timezone.now() - timedelta(seconds=2)
    pace = {"pace_seconds": 10.0, "pace_steps": 20.0, "last_report_at": ago}
    attempt = {"step": 50, "steps": 200, "latest": {"loss": 2.5}, **pace}
    job = lab.a_job(mira, project, state="running", attempt=attempt)
    answer = client.get(f"{JOBS}/{job.pk}").json()
    assert answer["progress"]["fraction"] == 0.25
    assert 70 <= answer["progress"]["eta_seconds"] <= 73
    assert answer["latest"]["loss"] == 2.5


# Other people's


@pytest.mark.parametrize(
    ("method", "rest"),
    [
        ("get", ""), ("patch", ""), ("delete", ""), ("post", "/cancel"), ("post", "/resume"), ("get", "/spec"),
        ("get", "/attempts"), ("get", "/checkpoints"), ("get", "/events"),
    ],
)  # fmt: skip
def test_a_job_that_you_may_not_see_is_not_there(mira, method, rest):
    siskin = lab.a_project("siskin")
    job = lab.a_job(lab.person("oskar", siskin), siskin)
    client = lab.bearer(mira)
    body = {} if method in {"patch", "post"} else None
    hidden = send(client, method, f"{JOBS}/{job.pk}{rest}", body)
    missing = send(client, method, f"{JOBS}/{job.pk + 1}{rest}", body)
    assert hidden.status_code == missing.status_code == 404
    assert hidden.json()["detail"].replace(str(job.pk), "N") == missing.json()["detail"].replace(str(job.pk + 1), "N")
    assert Job.objects.filter(pk=job.pk).exists()
    assert client.get(JOBS).json()["items"] == []


def test_a_colleagues_job_may_be_read_but_not_changed(mira, project):
    job = lab.a_job(mira, project, state="running")
    client = lab.bearer(lab.person("tomas", project))
    assert client.get(f"{JOBS}/{job.pk}").status_code == 200
    for method, rest, body in (("patch", "", {"notes": "x"}), ("delete", "", None), ("post", "/cancel", None)):
        answer = send(client, method, f"{JOBS}/{job.pk}{rest}", body)
        assert answer.status_code == 403
        assert "mira" in answer.json()["detail"]
    job.latest.refresh_from_db()
    assert job.latest.cancel_asked_at is None


# Changing


def test_change_name_tags_and_notes(client, mira, project):
    job = lab.a_job(mira, project, tags=("old", "kept"))
    answer = send(client, "patch", f"{JOBS}/{job.pk}", {"name": "better", "tags": ["kept", "new", "new"], "notes": "n"})
    assert (answer.json()["name"], answer.json()["tags"], answer.json()["notes"]) == ("better", ["kept", "new"], "n")
    answer = send(client, "patch", f"{JOBS}/{job.pk}", {"tags": []})
    assert (answer.json()["name"], answer.json()["tags"]) == ("better", [])


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"name": "../x"}, "name"),
        ({"name": None}, "name"),
        ({"tags": ["a b"]}, "tags.0"),
        ({"notes": "\0"}, "notes"),
        ({"state": "completed"}, "state"),
    ],
)
def test_wrong_changes_change_nothing(client, mira, project, changes, field):
    job = lab.a_job(mira, project, tags=("kept",))
    answer = send(client, "patch", f"{JOBS}/{job.pk}", changes)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == field
    assert client.get(f"{JOBS}/{job.pk}").json()["tags"] == ["kept"]


def test_cancel_is_requested_once_and_refused_after_the_end(client, mira, project):
    job = lab.a_job(mira, project, state="running")
    answer = send(client, "post", f"{JOBS}/{job.pk}/cancel")
    assert answer.status_code == 202
    assert answer.json()["attempt"]["cancel_asked_at"]
    ended = lab.a_job(mira, project)
    assert send(client, "post", f"{JOBS}/{ended.pk}/cancel").status_code == 409


def test_kill(client, mira, project):
    job = lab.a_job(mira, project, state="running")
    answer = send(client, "post", f"{JOBS}/{job.pk}/kill")
    assert answer.status_code == 202
    assert answer.json()["attempt"]["kill_requested_at"]
    assert answer.json()["attempt"]["cancel_asked_at"]
    ended = lab.a_job(mira, project)
    assert send(client, "post", f"{JOBS}/{ended.pk}/kill").status_code == 409
    others = lab.a_job(lab.person("yuki", project), project, state="running")
    assert send(client, "post", f"{JOBS}/{others.pk}/kill").status_code == 403
    assert send(lab.bearer(mira, scope="read"), "post", f"{JOBS}/{job.pk}/kill").status_code == 403


def test_resume(client, mira, project):
    running = lab.a_job(mira, project, state="running")
    assert send(client, "post", f"{JOBS}/{running.pk}/resume").status_code == 409
    job = lab.a_job(mira, project, state="failed")
    a_checkpoint(job, 100)
    wrong = send(client, "post", f"{JOBS}/{job.pk}/resume", {"step": 90})
    assert wrong.status_code == 422
    assert wrong.json()["errors"][0]["field"] == "step"
    answer = send(client, "post", f"{JOBS}/{job.pk}/resume", {"step": 100}, Idempotency_Key="r")
    assert answer.status_code == 201
    assert answer.json()["number"] == 2
    again = send(client, "post", f"{JOBS}/{job.pk}/resume", {"step": 100}, Idempotency_Key="r")
    assert again.json()["id"] == answer.json()["id"]
    completed = lab.a_job(mira, project)
    assert send(client, "post", f"{JOBS}/{completed.pk}/resume", {}).status_code == 409


def test_nothing_is_resumed_in_the_name_of_a_closed_account(mira, project):
    job = lab.a_job(mira, project, state="failed")
    type(mira).objects.filter(pk=mira.pk).update(is_active=False)
    lead = lab.bearer(lab.person("lena", project, role="lead"))
    answer = send(lead, "post", f"{JOBS}/{job.pk}/resume", {})
    assert answer.status_code == 409
    assert "The account of mira is deactivated" in answer.json()["detail"]
    assert answer.json()["detail"].endswith(f"Clone #{job.pk} to run it in your name.")
    assert job.attempts.count() == 1


@pytest.mark.parametrize("body", [{"step": -1}, {"step": "100"}, {"step": 1.5}, {"step": 2**70}, {"to": 5}])
def test_resume_refuses_nonsense(client, mira, project, body):
    job = lab.a_job(mira, project, state="failed")
    assert send(client, "post", f"{JOBS}/{job.pk}/resume", body).status_code in {400, 422}
    assert job.attempts.count() == 1


def test_delete_takes_everything_with_it(client, mira, project, settings):
    running = lab.a_job(mira, project, state="running")
    assert client.delete(f"{JOBS}/{running.pk}").status_code == 409
    folder = settings.VIGIL_RUNS / "default" / "7-abc"
    folder.mkdir(parents=True)
    job = lab.a_job(mira, project, directory="default/7-abc")
    a_checkpoint(job, 100)
    assert client.delete(f"{JOBS}/{job.pk}").status_code == 204
    assert client.get(f"{JOBS}/{job.pk}").status_code == 404
    assert not folder.exists()


def test_what_sysadmins_do_to_others_is_in_the_log(mira, project):
    sam = lab.sysadmin()
    job = lab.a_job(mira, project, state="running")
    assert send(lab.bearer(sam), "post", f"{JOBS}/{job.pk}/cancel").status_code == 202
    assert AuditEntry.objects.get().action == "job.cancelled"


# Parts


def test_attempts_checkpoints_and_events(client, mira, project):
    job = lab.a_job(mira, project, state="running")
    first = a_checkpoint(job, 100, bytes=5_000_000, seconds=0.4)
    a_checkpoint(job, 200, state="pruned")
    for i in range(5):
        data = {"step": i}
        Event.objects.create(attempt=job.latest, time=timezone.now(), kind="phase" if i else "run.started", data=data)
    attempts = client.get(f"{JOBS}/{job.pk}/attempts").json()["items"]
    assert [(a["number"], a["state"]) for a in attempts] == [(1, "running")]
    checkpoints = client.get(f"{JOBS}/{job.pk}/checkpoints").json()["items"]
    assert [(c["step"], c["resumable"], c["attempt"]) for c in checkpoints] == [(200, False, 1), (100, True, 1)]
    assert checkpoints[1]["id"] == first.pk
    newest = client.get(f"{JOBS}/{job.pk}/checkpoints?limit=1").json()
    assert newest["items"] == checkpoints[:1]
    older = client.get(f"{JOBS}/{job.pk}/checkpoints?limit=1&cursor={newest['next']}").json()
    assert (older["items"], older["next"]) == (checkpoints[1:], None)
    assert client.get(f"{JOBS}/{job.pk}/attempts?cursor={newest['next']}").status_code == 422, "of another list"
    page = client.get(f"{JOBS}/{job.pk}/events?limit=3").json()
    rest = client.get(f"{JOBS}/{job.pk}/events?limit=3&cursor={page['next']}").json()
    assert [event["data"]["step"] for event in page["items"] + rest["items"]] == [0, 1, 2, 3, 4]
    assert rest["next"] is None
    assert len(client.get(f"{JOBS}/{job.pk}/events?kind=phase&attempt=1").json()["items"]) == 4
    assert json.dumps(page)
