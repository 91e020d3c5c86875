"""Test what a site that hides other people's jobs hides at the edges: before, after, between and next to them."""

from __future__ import annotations

import time

import pytest
from django.conf import LazySettings
from django.test import Client
from django.utils import timezone

from console.pages.cluster_map.rows import machines
from jobs.listing.telemetry_access import hidden_now
from jobs.models import Job
from nodes.models import Gpu, Holding
from nodes.telemetry import merge
from portal.models import User
from tests.jobs.api.telemetry.test_machines import hold, machine_that_works, moment, running
from tests.lab import a_job, a_project, bearer, person, signed_in, sysadmin
from tests.nodes.telemetry.reporting import UUIDS, Machine

pytestmark = pytest.mark.django_db


@pytest.fixture
def mira(settings: LazySettings) -> User:
    settings.VIGIL_QUEUE_VISIBLE = "own"
    return person("mira", a_project(), slurm_user="mira")


@pytest.fixture
def noor(mira: User) -> User:
    return person("noor", a_project("other"), slurm_user="noor")


def others(machine: Machine, since: float, until: float | None, user: str = "mira", uuid: str = UUIDS[0]) -> Holding:
    return Holding.objects.create(
        gpu=Gpu.objects.get(uuid=uuid), agent=machine.agent, scheduler_id=f"past-{user}", user=user, name="secret",
        source="scheduler", since=moment(since), until=None if until is None else moment(until),
    )  # fmt: skip


class TestAJobsHeat:
    """Noor's job held a GPU for some minutes; Mira's was there before it and after."""

    @pytest.fixture
    def job(self, noor: User) -> Job:
        now = int(time.time())
        machine = Machine(gpus=UUIDS[:1])
        machine.post(machine.facts(now - 900))
        machine.fill(now - 900, now - 600, gpu_percent=90)
        machine.fill(now - 600, now - 300, gpu_percent=10)
        machine.fill(now - 300, now, gpu_percent=90)
        job = a_job(noor, a_project("other"), state="completed")
        running(job, seconds=600)
        hold()
        Holding.objects.update(until=moment(now - 300))
        attempt = job.latest
        assert attempt is not None
        attempt.ended_at = moment(now - 300)
        attempt.save()
        others(machine, now - 900, now - 600)
        others(machine, now - 300, None)
        return job

    @pytest.mark.parametrize("query", ["columns=1&from=0&to=1000000000000", "columns=1", "columns=7", ""])
    @pytest.mark.parametrize("is_merged", [False, True])
    def test_reveals_nothing_of_what_others_did(self, job: Job, noor: User, query: str, is_merged: bool) -> None:
        if is_merged:
            merge.merge(now=time.time() + 10_000)
        for user in (noor, sysadmin()):
            payload = bearer(user).get(f"/api/v1/jobs/{job.pk}/gpus?{query}").json()
            values = {value for row in payload["items"] for value in row["mean"] + row["most"]}
            assert values <= {10, None}

    def test_is_whole_where_everybody_sees_all(self, job: Job, noor: User, settings: LazySettings) -> None:
        settings.VIGIL_QUEUE_VISIBLE = "everyone"
        payload = bearer(noor).get(f"/api/v1/jobs/{job.pk}/gpus?columns=1&from=0&to=1000000000000").json()
        assert payload["items"][0]["mean"] == [10]


def test_what_a_machine_reported_last_stays_hidden_after_the_job(mira: User, noor: User) -> None:
    machine, now = machine_that_works(), int(time.time())
    process = {"gpu": UUIDS[0], "pid": 5, "user": "mira", "name": "secret.py", "memory_mib": 5, "job": "1"}
    machine.post({**machine.batch(now - 10, gpu_percent=55), "processes": [process]})
    others(machine, now - 300, now - 2)
    for path in ("nodes/dgx-01/telemetry", "nodes/dgx-01/gpus", "gpus"):
        answer = bearer(noor).get(f"/api/v1/{path}")
        payload = answer.json()
        first = (payload.get("gpus") or payload.get("items"))[0]
        assert (first["newest"], first["processes"]) == ({}, []), path
        assert "secret.py" in bearer(mira).get(f"/api/v1/{path}").content.decode()
    for page in ("/nodes/dgx-01", "/cluster/dgx-01/0"):
        assert "secret" not in signed_in(noor).get(page).content.decode()


def ran(user: User, number: str, since: float, until: float | None) -> Job:
    """Create a job of Vigil that ran in this time with this scheduler id."""
    job = a_job(user, a_project("other"), state="running" if until is None else "completed")
    attempt = job.latest
    assert attempt is not None
    attempt.scheduler_id, attempt.started_at = number, moment(since)
    attempt.ended_at = None if until is None else moment(until)
    attempt.save()
    return job


class TestANumberThatTheSchedulerUsesAgain:
    """Mira's job holds GPU 0, and Noor's had or gets the same number at another time."""

    @pytest.mark.parametrize("is_confirmed", [True, False])
    def test_of_an_older_job_shows_nothing_of_a_newer(self, mira: User, noor: User, is_confirmed: bool) -> None:
        machine, now = machine_that_works(), time.time()
        others(machine, now - 300, None)
        job = ran(noor, "past-mira", now - 900, now - 400 if is_confirmed else None)
        if not is_confirmed:  # and a mere claim to a number reveals nothing
            Job.objects.filter(pk=job.pk).update(kind=Job.ATTACHED)
        first, second = bearer(noor).get("/api/v1/nodes/dgx-01/gpus").json()["items"]
        assert (first["newest"], first["holders"]) == ({}, [])
        assert second["newest"]["gpu_percent"] == 20
        assert hidden_now(noor) == {UUIDS[0]}
        assert "secret" not in signed_in(noor).get("/nodes/dgx-01").content.decode()

    def test_of_a_newer_job_shows_nothing_of_an_older(self, mira: User, noor: User) -> None:
        machine, now = machine_that_works(), int(time.time())
        others(machine, now - 500, now - 300)
        ran(noor, "past-mira", now - 200, None)
        text = f"/api/v1/nodes/dgx-01/series?gpu=0&from={now - 450}&to={now - 350}"
        (line,) = bearer(noor).get(text).json()["items"]
        assert line["value"] == []
        (line,) = bearer(mira).get(text).json()["items"]
        assert set(line["value"]) == {10}

    @pytest.mark.parametrize("until", [None, -10])
    def test_of_the_job_itself_shows_it(self, mira: User, noor: User, until: int | None) -> None:
        machine, now = machine_that_works(), int(time.time())
        ends = None if until is None else now + until
        others(machine, now - 300, ends, user="vigil")
        ran(noor, "past-vigil", now - 310, ends)
        (line,) = bearer(noor).get(f"/api/v1/nodes/dgx-01/series?gpu=0&from={now - 200}&to={now - 100}").json()["items"]
        assert set(line["value"]) == {10}
        assert hidden_now(noor) == set()


def test_a_curve_of_few_points_begins_no_earlier_than_it_may(mira: User, noor: User) -> None:
    machine, start = Machine(gpus=UUIDS[:1]), int(time.time()) // 1024 * 1024 - 4 * 1024
    machine.post(machine.facts(start))
    machine.fill(start, start + 500, gpu_percent=90)
    machine.fill(start + 500, start + 3 * 1024, gpu_percent=10)
    others(machine, start, start + 500)
    merge.merge(now=time.time() + 10_000)
    series = f"/api/v1/nodes/dgx-01/series?gpu=0&points=2&from={start + 510}&to={start + 3_000}"
    (line,) = bearer(noor).get(series).json()["items"]
    report = line.get("max") or line.get("value") or []
    assert 90 not in report


def test_the_kernels_words_name_nobody_elses_process(mira: User, noor: User) -> None:
    machine, now = machine_that_works(), int(time.time())
    others(machine, now - 100, None)
    for seq, at in enumerate((now - 200, now - 50)):
        text = f"pid={seq}, name=secret.py"
        machine.post(machine.event("xid", at, gpu=UUIDS[0], xid=31, seq=seq, text=text))
    machine.post(machine.event("xid", now, xid=31, seq=9, text="of some GPU, name=secret.py"))
    sam = sysadmin()
    for path in ("/api/v1/nodes/dgx-01/events", "/nodes/dgx-01"):
        assert "secret.py" not in signed_in(noor).get(path).content.decode(), path
        assert "secret.py" in signed_in(sam).get(path).content.decode(), path


def test_a_gpu_that_two_jobs_share_reveals_nothing_on_its_map(mira: User, noor: User) -> None:
    machine, now = machine_that_works(), int(time.time())
    others(machine, now - 300, None, "mira", UUIDS[1])
    others(machine, now - 200, None, "noor", UUIDS[1])
    (node,) = machines(noor, timezone.now())
    assert (node.devices[1].is_hidden, node.devices[1].percent, node.devices[1].holder) == (True, None, None)


@pytest.mark.parametrize("path", ["series", "series.csv", "series.parquet"])
def test_a_span_of_all_time_is_soon_answered(mira: User, client: Client, path: str) -> None:
    machine_that_works(seconds=30)
    began = time.process_time()
    answer = bearer(mira).get(f"/api/v1/nodes/dgx-01/{path}?gpu=0&from=0&to=1000000000000")
    assert answer.status_code == 200
    assert answer.content if not answer.streaming else b"".join(answer)
    assert time.process_time() - began < 10


def test_names_of_mounts_do_not_break_the_csv(mira: User) -> None:
    machine, now = Machine(), int(time.time())
    name = 'disk_used_mib:/a,"b'
    machine.post(machine.batch(now - 10, host={name: 5}))
    answer = bearer(mira).get("/api/v1/nodes/dgx-01/series.csv", {"name": name})
    assert b"".join(answer).decode().splitlines()[1].startswith('dgx-01,,"disk_used_mib:/a,""b",')
