"""Test POST jobs/attach: following a job that was started with sbatch."""

from __future__ import annotations

import re
from typing import Any

import pytest
from django.test import Client

from jobs.models import Attempt, Job
from portal.models import User, digest
from tests.lab import bearer, send

pytestmark = pytest.mark.django_db
PATH = "/api/v1/jobs/attach"


@pytest.fixture(autouse=True)
def on_slurm(settings: Any, mira: User) -> None:
    settings.VIGIL_SCHEDULER = "slurm"
    User.objects.filter(pk=mira.pk).update(slurm_user="mira")
    mira.slurm_user = "mira"


def test_it_is_made_once_and_then_the_same(client: Client) -> None:
    first = send(client, "post", PATH, {"scheduler_id": "77", "tags": ["a"], "notes": "n"})
    again = send(client, "post", PATH, {"scheduler_id": "77"})
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json()["job"]["id"] == again.json()["job"]["id"]
    assert first.headers["Location"] == f"/api/v1/jobs/{first.json()['job']['id']}"
    job = first.json()["job"]
    assert (job["kind"], job["name"], job["state"], job["tags"]) == ("attached", "slurm-77", "pending", ["a"])
    assert first.json()["reports"] is None
    assert Attempt.objects.get().token_digest == ""


def test_a_repeat_returns_the_same_token_and_only_its_digest_is_stored(client: Client) -> None:
    options = {"scheduler_id": "17_3", "restart_count": 2, "reports": True}
    first, again = (send(client, "post", PATH, options).json()["reports"] for _ in range(2))
    assert first == again
    assert (first["scheduler_id"], first["restart_count"], first["number"]) == ("17_3", 2, 1)
    attempt = Attempt.objects.get()
    assert attempt.token_digest == digest(first["token"])
    assert first["token"] not in str(Attempt.objects.values())
    other = send(client, "post", PATH, {**options, "scheduler_id": "78"}).json()["reports"]
    assert other["token"] != first["token"]


def test_its_reports_are_taken_and_its_checkpoints_are_not_ours(client: Client) -> None:
    reports = send(client, "post", PATH, {"scheduler_id": "77", "reports": True}).json()["reports"]
    stream = {"id": "0" * 16, "incarnation": 0, "rank": 0, "node": "n", "boot_id": "", "restart_count": 0, "first": 0}
    committed = {"kind": "checkpoint.committed", "step": 5, "generation": 1, "name": "step-5", "bytes": 1}
    post = {
        "version": 1,
        "streams": [{**stream, "times": [1_700_000_000.0], "end": True}],
        "series": {"loss": {"runs": [[0, 0, 1]], "step": [5], "value": [0.5]}},
        "events": [{**committed, "stream": 0, "batch": 0, "time": 1_700_000_000.0}],
    }
    path = f"/api/v1/attempts/{reports['attempt']}/reports"
    answer = send(Client(headers={"Authorization": f"Bearer {reports['token']}"}), "post", path, post)
    assert answer.status_code == 200, answer.content
    job_id = Job.objects.get().pk
    job = client.get(f"/api/v1/jobs/{job_id}").json()
    assert job["latest"] == {"loss": 0.5}
    assert client.get(f"/api/v1/jobs/{job_id}/checkpoints").json()["items"] == []
    kinds = [event["kind"] for event in client.get(f"/api/v1/jobs/{job_id}/events").json()["items"]]
    assert "checkpoint.committed" in kinds
    for part in ("", "/spec", "/spec?pinned=true", "/attempts", "/why"):
        assert client.get(f"/api/v1/jobs/{job_id}{part}").status_code in {200, 409}, part


@pytest.mark.parametrize("number", ["", "0", "-1", "1;2", "1.batch", "x", "77 ", "1" * 11, 77, None])
def test_what_is_no_number_is_refused(client: Client, number: object) -> None:
    answer = send(client, "post", PATH, {"scheduler_id": number})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"].endswith("scheduler_id")


def test_a_token_that_only_reads_attaches_nothing(mira: User) -> None:
    assert send(bearer(mira, scope="read"), "post", PATH, {"scheduler_id": "77"}).status_code == 403


def test_attached_is_no_kind_to_submit(client: Client) -> None:
    answer = send(client, "post", "/api/v1/jobs", {"spec": {"name": "x", "kind": "attached"}})
    assert answer.status_code == 422
    (error,) = answer.json()["errors"]
    assert error["field"] == "kind"
    assert re.search("`vigil attach -- COMMAND`", error["message"])
