"""Test profiles: requested by page and REST, reported by events, downloaded from a folder with any content."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from jobs.disk import profiles as files
from jobs.disk import rundir
from jobs.models import Event, Job
from portal.models import Project, User
from tests.jobs.pages.reading import text
from tests.lab import a_job, bearer, on_disk, person, send, signed_in

pytestmark = pytest.mark.django_db
NAME = "step-90-94.rank0.abc123.json.gz"
SAVED = {"id": "abc123", "name": NAME, "of_rank": 0, "first_step": 90, "last_step": 94, "bytes": 9, "seconds": 0.1}


@pytest.fixture
def job(mira: User, project: Project) -> Job:
    job = a_job(mira, project, state="running", attempt={"directory": "attempt-1"})
    on_disk(job)
    return job


def folder(job: Job) -> Path:
    found = rundir.path_of(job.directory) / "job" / "attempt-1" / "profiles"
    found.mkdir(parents=True, exist_ok=True)
    return found


def add_event(job: Job, kind: str, **data: Any) -> None:
    Event.objects.create(attempt=job.latest, time=timezone.now(), kind=kind, rank=0, incarnation=0, data=data)


def listed(client: Client, job: Job) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get(f"/api/v1/jobs/{job.pk}/profiles").json()["items"]
    return found


def test_requests_it_of_the_rank_through_the_run_directory(job: Job, mira: User) -> None:
    client = bearer(mira)
    answer = send(client, "post", f"/api/v1/jobs/{job.pk}/profile", {"steps": 7, "rank": 3})
    assert answer.status_code == 202
    number = answer.json()["id"]
    payload = json.loads((rundir.path_of(job.directory) / "portal" / "profile.json").read_text())
    assert payload == {"id": number, "directory": "attempt-1", "rank": 3, "steps": 7}
    (waiting,) = listed(client, job)
    assert (waiting["id"], waiting["rank"], waiting["waits"], waiting["name"]) == (number, 3, True, "")
    add_event(job, "profile.saved", **{**SAVED, "id": number})
    (saved,) = listed(client, job)
    assert (saved["name"], saved["first_step"], saved["waits"]) == (NAME, 90, False)


def test_a_profile_that_another_replaced_before_it_began_waits_no_more(job: Job, mira: User) -> None:
    client = bearer(mira)
    first, last = (send(client, "post", f"/api/v1/jobs/{job.pk}/profile", {"rank": 0}).json()["id"] for _ in range(2))
    assert [item["waits"] for item in listed(client, job)] == [True, True], "the first may be under way"
    add_event(job, "profile.saved", **{**SAVED, "id": last})
    report = {item["id"]: (item["waits"], item["problem"]) for item in listed(client, job)}
    assert report == {first: (False, "Another profile was requested before it began."), last: (False, "")}


@pytest.mark.parametrize(
    ("body", "fields"),
    [({"steps": 0}, ["steps"]), ({"steps": 101}, ["steps"]), ({"rank": -1}, ["rank"]), ({"x": 1}, ["x"])],
)
def test_names_what_is_wrong_with_a_request(job: Job, mira: User, body: dict[str, Any], fields: list[str]) -> None:
    answer = send(bearer(mira), "post", f"/api/v1/jobs/{job.pk}/profile", body)
    assert answer.status_code == 422
    assert [error["field"] for error in answer.json()["errors"]] == fields


def test_a_rank_that_a_lost_node_took_with_it_gets_no_request(job: Job, mira: User) -> None:
    add_event(job, "incarnation.started", incarnation=0, world_size=4, nodes=["dgx-01", "dgx-02"])
    add_event(job, "incarnation.started", incarnation=1, world_size=2, nodes=["dgx-01"])
    answer = send(bearer(mira), "post", f"/api/v1/jobs/{job.pk}/profile", {"rank": 2})
    assert answer.status_code == 422
    assert answer.json()["errors"] == [{"field": "rank", "message": "there is no rank 2 now: use 0 to 1."}]
    assert send(bearer(mira), "post", f"/api/v1/jobs/{job.pk}/profile", {"rank": 1}).status_code == 202


def test_only_who_may_change_a_running_job_of_ours(job: Job, mira: User, project: Project) -> None:
    path = f"/api/v1/jobs/{job.pk}/profile"
    assert send(bearer(person("stranger")), "post", path).status_code == 404
    assert send(bearer(person("noor", project)), "post", path).status_code == 403
    assert send(bearer(mira, scope="read"), "post", path).status_code == 403
    for state in ("pending", "completing", "completed"):
        other = a_job(mira, project, state=state)
        assert send(bearer(mira), "post", f"/api/v1/jobs/{other.pk}/profile").status_code == 409
    script = a_job(mira, project, state="running", kind="script")
    assert send(bearer(mira), "post", f"/api/v1/jobs/{script.pk}/profile").status_code == 409
    young = a_job(mira, project, state="running")  # its launcher has made no folder yet
    assert send(bearer(mira), "post", f"/api/v1/jobs/{young.pk}/profile").status_code == 404


def test_a_profile_that_its_attempt_did_not_live_to_write_is_reported_lost(job: Job, mira: User) -> None:
    add_event(job, "profile.asked", id="abc123", rank=0)
    add_event(job, "profile.failed", id="def456", of_rank=1, reason="No space left on device")
    assert [report["problem"] for report in listed(bearer(mira), job)] == ["No space left on device", ""]
    job.attempts.update(state="failed")
    assert "ended before" in listed(bearer(mira), job)[1]["problem"]


@pytest.mark.parametrize("browser", [True, False])
def test_downloads_a_trace_as_it_was_written(job: Job, mira: User, project: Project, browser: bool) -> None:
    (folder(job) / NAME).write_bytes(b"\x1f\x8bdata" * 50_000)
    path = f"jobs/{job.pk}/profiles/1/{NAME}"
    client = signed_in(mira) if browser else bearer(mira)
    answer: Any = client.get(f"/{path}" if browser else f"/api/v1/{path}")
    assert answer.status_code == 200
    assert b"".join(answer.streaming_content) == b"\x1f\x8bdata" * 50_000
    assert answer.headers["Content-Disposition"] == f'attachment; filename="job-{job.pk}.1-{NAME}"'
    assert answer.headers["Content-Type"] == "application/gzip"
    stranger = person("stranger")
    client = signed_in(stranger) if browser else bearer(stranger)
    assert client.get(f"/{path}" if browser else f"/api/v1/{path}").status_code == 404


def test_nothing_else_is_handed_out(job: Job, mira: User, tmp_path: Path) -> None:
    place = folder(job)
    (tmp_path / "secret").write_text("secret")
    os.symlink(tmp_path / "secret", place / NAME)
    (place / "other.json.gz").write_text("no profile's name")
    os.mkfifo(place / "step-1-2.rank0.a.json.gz")
    (place / "step-1-2.rank0.b.json.gz").mkdir()
    names = [NAME, "other.json.gz", "step-1-2.rank0.a.json.gz", "step-1-2.rank0.b.json.gz", "step-1-2.rank0.c.json.gz"]
    for name in [*names, "..%2F..%2Fportal%2Fspec.toml", ".abc123.0", "step-1-2.rank0.a.json.gz%0A"]:
        assert bearer(mira).get(f"/api/v1/jobs/{job.pk}/profiles/1/{name}").status_code == 404, name
        assert signed_in(mira).get(f"/jobs/{job.pk}/profiles/1/{name}").status_code == 404, name
    assert bearer(mira).get(f"/api/v1/jobs/{job.pk}/profiles/2/{NAME}").status_code == 404


def test_who_goes_before_the_first_piece_leaves_no_file_open(job: Job) -> None:
    place = rundir.path_of(job.directory) / "job" / "attempt-1" / "profiles"
    place.mkdir(parents=True, exist_ok=True)
    (place / NAME).write_bytes(b"x")
    assert job.latest is not None
    before = len(os.listdir("/proc/self/fd"))
    request = files.download(job.latest, NAME)
    del request
    assert len(os.listdir("/proc/self/fd")) == before


def test_events_that_make_no_sense_are_shown_as_nothing(job: Job, mira: User) -> None:
    for data in ({}, {"id": 7}, {"id": "x" * 99}, {"id": ["a"]}):
        add_event(job, "profile.saved", **data)
    add_event(job, "profile.saved", id="odd", name="<b>", of_rank="0", first_step=-1, last_step=1e99, bytes=True)
    (odd,) = listed(bearer(mira), job)
    assert (odd["name"], odd["rank"], odd["first_step"], odd["last_step"], odd["bytes"]) == ("<b>", 0, 0, 0, 0)
    page = text(signed_in(mira).get(f"/jobs/{job.pk}"))
    assert "<b>" not in page


def test_the_button_requests_and_the_page_shows_what_there_is(job: Job, mira: User, project: Project) -> None:
    client = signed_in(mira)
    assert "Profile 5 steps" in text(client.get(f"/jobs/{job.pk}"))
    assert "Profile 5 steps" not in text(signed_in(person("noor", project)).get(f"/jobs/{job.pk}"))
    answer = client.post(f"/jobs/{job.pk}/profile", {"steps": "5"}, follow=True)
    page = text(answer)
    assert "Rank 0 records its next 5 steps." in page
    assert "Rank 0, requested" in page
    (event,) = Event.objects.filter(kind="profile.asked")
    add_event(job, "profile.saved", **{**SAVED, "id": event.data["id"]})
    page = text(client.get(f"/jobs/{job.pk}/life?tab=overview"))
    assert "Steps 90–94, rank 0" in page
    assert f"/jobs/{job.pk}/profiles/1/{NAME}" in page
    assert "Rank 0, requested" not in page
    job.attempts.update(state="completed", ended_at=timezone.now())
    refused = text(client.post(f"/jobs/{job.pk}/profile", follow=True))
    assert "Not profiled." in refused
    assert "Profile 5 steps" not in refused
