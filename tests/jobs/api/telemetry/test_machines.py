"""Test machines over REST: values, curves and events, each as the person may see it; and the use of a job's GPUs."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.conf import LazySettings

from jobs.models import Attempt, Event, Job
from nodes.models import Holding, QueuedJob
from nodes.telemetry import merge
from nodes.telemetry.fields import WINDOW_S
from portal.models import User
from portal.series import store
from portal.series.store import NewPoints
from tests.lab import a_job, a_project, bearer, person, send, sysadmin
from tests.nodes.telemetry.reporting import UUIDS, Machine

pytestmark = pytest.mark.django_db


def moment(second: float) -> datetime:
    return datetime.fromtimestamp(second, UTC)


@pytest.fixture
def mira() -> User:
    return person("mira", a_project(), slurm_user="mira")


def running(job: Job, *, seconds: int = 600, indices: tuple[int, ...] = (0,), node: str = "dgx-01") -> QueuedJob:
    """Run the job on these GPUs of a machine, as the scheduler reports it."""
    attempt = job.latest
    assert attempt is not None
    attempt.scheduler_id, attempt.nodes, attempt.started_at = str(job.pk), [node], moment(time.time() - seconds)
    attempt.save()
    return QueuedJob.objects.create(
        scheduler_id=str(job.pk), name=job.name, user=job.owner.slurm_user or "vigil", state="running", nodes=[node],
        gpus=len(indices), gpu_indices={node: list(indices)}, started_at=attempt.started_at,
    )  # fmt: skip


def report_gpus(job: Job, data: dict[str, Any]) -> None:
    assert job.latest is not None
    Event.objects.create(attempt=job.latest, time=moment(time.time()), kind="gpus", rank=-1, data=data)


def machine_that_works(*, seconds: int = 600, gpus: int = 2) -> Machine:
    """Return a machine whose GPU i was used 10 × (i + 1) % in the last `seconds` seconds."""
    machine, now = Machine(gpus=UUIDS[:gpus]), int(time.time())
    machine.post(machine.facts(now - seconds))
    rows = [[10 * (i + 1)] * 10 for i in range(gpus)]
    machine.fill(now - seconds, now, gpu_percent=rows, watts=300, host={"cpu_percent": 12.5})
    return machine


def hold() -> None:
    from jobs import allocations

    allocations.update()


def test_what_a_machine_does_now(mira: User) -> None:
    machine_that_works()
    running(a_job(mira, a_project(), state="running", name="wren"))
    hold()
    payload = bearer(mira).get("/api/v1/nodes/dgx-01/telemetry").json()
    assert (payload["is_silent"], payload["host"], payload["facts"]["driver"]) == (
        False,
        {"cpu_percent": 12.5},
        "570.195.03",
    )
    first, second = payload["gpus"]
    assert (first["newest"]["gpu_percent"], second["newest"]["gpu_percent"]) == (10, 20)
    (holder,) = first["holders"]
    assert (holder["name"], holder["user"], holder["source"]) == ("wren", "mira", "scheduler")
    assert second["holders"] == []


def test_curves_of_gpus_and_of_the_machine(mira: User) -> None:
    machine_that_works()
    client, now = bearer(mira), int(time.time())
    text = f"/api/v1/nodes/dgx-01/series?name=gpu_percent&name=cpu_percent&from={now - 300}&to={now + 60}"
    lines = client.get(text).json()["items"]
    assert [(line["name"], line["gpu"]) for line in lines] == [
        ("gpu_percent", 0), ("gpu_percent", 1), ("cpu_percent", None)
    ]  # fmt: skip
    assert set(lines[1]["value"]) == {20}
    assert len(lines[1]["step"]) >= 290
    few = client.get(text + "&points=10&gpu=1").json()["items"][0]
    assert (few["gpu"], few["uuid"]) == (1, UUIDS[1])
    assert (len(few["mean"]) <= 10, set(few["mean"])) == (True, {20})


@pytest.mark.parametrize("query", ["gpu=9", "from=20&to=10", "points=1", "name=" + "x" * 300])
def test_invalid_queries_are_refused_by_field(mira: User, query: str) -> None:
    machine_that_works(seconds=10)
    answer = bearer(mira).get(f"/api/v1/nodes/dgx-01/series?{query}")
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == query.partition("=")[0] + (".0" if query.startswith("name") else "")


def test_every_sample_as_csv(mira: User) -> None:
    machine_that_works(seconds=30)
    text = b"".join(bearer(mira).get("/api/v1/nodes/dgx-01/series.csv?name=gpu_percent&gpu=1"))
    header, *rows = text.decode().splitlines()
    assert header == "node,gpu,name,time,value"
    assert len(rows) == 30
    assert rows[0].startswith("dgx-01,1,gpu_percent,")
    assert rows[0].endswith(",20")


@pytest.mark.parametrize("path", ["telemetry", "gpus", "series", "series.csv", "events"])
def test_a_machine_that_nobody_knows(mira: User, path: str) -> None:
    assert bearer(mira).get(f"/api/v1/nodes/nowhere/{path}").status_code == 404


def test_events_newest_first_and_by_kind(mira: User) -> None:
    machine = machine_that_works(seconds=10)
    now = time.time()
    machine.post(machine.event("xid", now, gpu=UUIDS[1], xid=79, seq=4, text="GPU <b>has</b> fallen off the bus"))
    machine.post(machine.event("mount.slow", now + 1, mount="/data"))
    client = bearer(mira)
    items = client.get("/api/v1/nodes/dgx-01/events").json()["items"]
    assert [item["kind"] for item in items] == ["mount.slow", "xid"]
    (xid,) = client.get("/api/v1/nodes/dgx-01/events?kind=xid").json()["items"]
    assert (xid["code"], xid["gpu"], xid["text"]) == (79, 1, "GPU <b>has</b> fallen off the bus")
    first = client.get("/api/v1/nodes/dgx-01/events?limit=1").json()
    rest = client.get(f"/api/v1/nodes/dgx-01/events?limit=1&cursor={first['next']}").json()
    assert [item["kind"] for item in first["items"] + rest["items"]] == ["mount.slow", "xid"]


class TestOthers:
    """Test that a site that hides other people's jobs also hides what their GPUs do."""

    @pytest.fixture
    def noor(self, settings: LazySettings, mira: User) -> User:
        """Return a person of another project; mira's job holds GPU 0."""
        settings.VIGIL_QUEUE_VISIBLE = "own"
        machine = machine_that_works()
        running(a_job(mira, a_project(), state="running"), seconds=300)
        hold()
        now = int(time.time())
        process = {"gpu": UUIDS[0], "pid": 5, "user": "mira", "name": "secret.py", "memory_mib": 5, "job": "1"}
        machine.post({**machine.batch(now, gpu_percent=10, host={"cpu_percent": 1}), "processes": [process]})
        machine.post(machine.event("xid", now, gpu=UUIDS[0], xid=31, seq=1, text="pid=5, name=secret.py"))
        return person("noor", a_project("other"), slurm_user="noor")

    @staticmethod
    def visible_to(user: User) -> tuple[Any, ...]:
        client, now = bearer(user), int(time.time())
        payload = client.get("/api/v1/nodes/dgx-01/telemetry").json()
        first = payload["gpus"][0]
        line = client.get(f"/api/v1/nodes/dgx-01/series?gpu=0&from={now - 900}&points=2000").json()["items"][0]
        csv = b"".join(client.get(f"/api/v1/nodes/dgx-01/series.csv?gpu=0&from={now - 900}"))
        (event,) = client.get("/api/v1/nodes/dgx-01/events").json()["items"]
        latest = max(line["step"]) > now - 250
        return (
            bool(first["newest"]),
            len(first["processes"]),
            len(first["holders"]),
            latest,
            event["text"],
            len(csv) > 15_000,
        )

    def test_a_stranger_sees_what_was_before(self, noor: User) -> None:
        assert self.visible_to(noor) == (False, 0, 0, False, "", False)
        assert bearer(noor).get("/api/v1/nodes/dgx-01/gpus").json()["items"][1]["newest"]["gpu_percent"] == 10

    def test_its_owner_and_sysadmins_see_all(self, noor: User, mira: User) -> None:
        for user in (mira, sysadmin()):
            assert self.visible_to(user) == (True, 1, 1, True, "pid=5, name=secret.py", True)


class TestOfAJob:
    def test_rows_by_the_agents(self, mira: User) -> None:
        machine = machine_that_works(gpus=4)
        job = a_job(mira, a_project(), state="running")
        running(job, indices=(1, 3))
        hold()
        heat = bearer(mira).get(f"/api/v1/jobs/{job.pk}/gpus?columns=20").json()
        assert heat["source"] == "agent"
        assert [(row["attempt"], row["node"], row["gpu"]) for row in heat["items"]] == [
            (1, "dgx-01", 1),
            (1, "dgx-01", 3),
        ]
        assert {value for value in heat["items"][1]["mean"] if value is not None} == {40}
        assert heat["mean"] == 30
        other = bearer(mira).get(f"/api/v1/jobs/{job.pk}/gpus?field=watts").json()
        assert other["mean"] == 300
        assert machine.agent.gpus.count() == 4

    def test_what_is_merged_and_what_is_not(self, mira: User) -> None:
        seconds = 3 * WINDOW_S
        machine_that_works(seconds=seconds, gpus=1)
        job = a_job(mira, a_project(), state="running")
        running(job, seconds=seconds)
        hold()
        before = bearer(mira).get(f"/api/v1/jobs/{job.pk}/gpus?columns=7").json()
        assert merge.merge() > 0
        after = (
            bearer(mira).get(f"/api/v1/jobs/{job.pk}/gpus?columns=7&to={before['start'] + 7 * before['width']}").json()
        )
        assert set(after["items"][0]["mean"]) == set(before["items"][0]["mean"]) == {10}

    def test_a_launcher_names_its_gpus(self, mira: User) -> None:
        machine_that_works(gpus=4)
        job = a_job(mira, a_project(), state="running")
        running(job, indices=(0,))
        payload = {"node": "dgx-01", "gpus": [{"local_rank": 0, "uuid": UUIDS[2]}]}
        report_gpus(job, payload)
        hold()
        (row,) = bearer(mira).get(f"/api/v1/jobs/{job.pk}/gpus").json()["items"]
        assert row["uuid"] == UUIDS[2]

    def test_reports_of_an_earlier_attempt_no_longer_count(self, mira: User) -> None:
        """Slurm queues a job again by its own number."""
        machine_that_works(gpus=4)
        job = a_job(mira, a_project(), state="running")
        running(job, indices=(0,))
        report_gpus(job, {"gpus": [{"uuid": UUIDS[3]}]})
        assert job.latest is not None
        Attempt.objects.filter(pk=job.latest.pk).update(ended_at=moment(time.time()))
        again = Attempt.objects.create(
            job=job, number=2, scheduler_id=str(job.pk), state="running", started_at=moment(time.time() - 60)
        )
        hold()
        assert {row.gpu.uuid for row in Holding.objects.filter(until=None)} == {UUIDS[0]}
        for uuid in UUIDS[:3]:
            payload = {"gpus": [{"uuid": uuid}]}
            Event.objects.create(attempt=again, time=moment(time.time()), kind="gpus", rank=-1, data=payload)
        hold()
        assert {row.gpu.uuid for row in Holding.objects.filter(until=None)} == {UUIDS[2]}, "the last word counts"

    def test_a_slice_is_reported_as_the_gpu_that_it_is_cut_from(self, mira: User) -> None:
        machine = machine_that_works(gpus=2)
        report = machine.facts(time.time())
        report["events"][0]["gpus"][1] |= {"mig": True}
        machine.post(report)
        job = a_job(mira, a_project(), state="running")
        running(job, indices=(9,))
        parts = [{"local_rank": i, "uuid": f"MIG-0000000{i}", "parent": UUIDS[1]} for i in range(2)]
        report_gpus(job, {"gpus": parts})
        hold()
        (row,) = bearer(mira).get(f"/api/v1/jobs/{job.pk}/gpus").json()["items"]
        assert row["uuid"] == UUIDS[1]

    @pytest.mark.parametrize(
        "data",
        [
            {}, {"gpus": None}, {"gpus": "GPU-1"}, {"gpus": [None, 3, []]}, {"gpus": [{}] * 5000},
            {"gpus": [{"uuid": 5}, {"uuid": "x" * 500}, {"uuid": "GPU\n", "parent": {}}]},
        ],
    )  # fmt: skip
    def test_a_launcher_that_talks_nonsense(self, mira: User, data: dict[str, Any]) -> None:
        machine_that_works(gpus=2)
        job = a_job(mira, a_project(), state="running")
        running(job, indices=(0,))
        report_gpus(job, data)
        hold()
        (row,) = bearer(mira).get(f"/api/v1/jobs/{job.pk}/gpus").json()["items"]
        assert row["uuid"] == UUIDS[0]

    def test_rows_by_the_launchers_where_there_is_no_agent(self, mira: User) -> None:
        from jobs.models import Stream

        job = a_job(mira, a_project(), state="running")
        assert job.latest is not None
        began = time.time() - 300
        job.latest.started_at = moment(began)
        job.latest.save()
        Stream.objects.create(attempt=job.latest, uid="a" * 16, incarnation=0, rank=-1, node="dgx-01")
        import numpy as np

        ids = store.declare(("attempt", job.latest.pk), ["gpu_percent"])
        runs = [(-1, began + second, 1) for second in range(0, 300, 10)]
        column = np.arange(0, 300, 10), np.full(30, 55.0)
        store.append(ids, [NewPoints("gpu_percent", 0, runs, *column)])
        heat = bearer(mira).get(f"/api/v1/jobs/{job.pk}/gpus?columns=30").json()
        assert (heat["source"], heat["mean"]) == ("launcher", 55)
        assert [(row["node"], row["gpu"]) for row in heat["items"]] == [("dgx-01", None)]
        assert bearer(mira).get(f"/api/v1/jobs/{job.pk}/gpus?field=temperature_c").json()["source"] == ""

    def test_a_number_that_the_scheduler_uses_again_is_another_job(self, mira: User) -> None:
        machine_that_works(gpus=1)
        old, new = a_job(mira, a_project(), state="completed"), a_job(mira, a_project(), state="running")
        row = running(new, seconds=200)
        assert old.latest is not None
        old.latest.scheduler_id = row.scheduler_id
        old.latest.started_at, old.latest.ended_at = (moment(time.time() - back) for back in (600, 400))
        old.latest.save()
        hold()
        client = bearer(mira)
        assert client.get(f"/api/v1/jobs/{old.pk}/gpus").json()["items"] == []
        assert len(client.get(f"/api/v1/jobs/{new.pk}/gpus").json()["items"]) == 1

    def test_nobody_sees_those_of_a_job_that_they_cannot_see(self, mira: User) -> None:
        job = a_job(mira, a_project(), state="running")
        assert bearer(person("noor", a_project("other"))).get(f"/api/v1/jobs/{job.pk}/gpus").status_code == 404

    @pytest.mark.parametrize("query", ["field=loss", "columns=0", "from=9&to=3"])
    def test_invalid_queries(self, mira: User, query: str) -> None:
        job = a_job(mira, a_project(), state="running")
        assert bearer(mira).get(f"/api/v1/jobs/{job.pk}/gpus?{query}").status_code == 422


class TestTokens:
    def test_a_sysadmin_enrols_a_machine(self) -> None:
        boss = bearer(sysadmin(), scope="admin")
        payload = send(boss, "post", "/api/v1/nodes/dgx-07/token").json()
        assert payload["node"] == "dgx-07"
        machine = Machine("dgx-07", token=payload["token"])
        assert machine.post(machine.batch(int(time.time()), gpu_percent=1)).status_code == 200
        (agent,) = boss.get("/api/v1/agents").json()["items"]
        assert (agent["node"], agent["is_silent"], agent["gpus"]) == ("dgx-07", False, 2)

    def test_nobody_else_does(self, mira: User) -> None:
        for client in (bearer(mira), bearer(mira, scope="admin"), bearer(sysadmin(), scope="write")):
            assert send(client, "post", "/api/v1/nodes/dgx-07/token").status_code == 403
            assert send(client, "post", "/api/v1/agents/secret").status_code == 403

    def test_a_secret_enrols_each_name_once(self) -> None:
        boss = bearer(sysadmin(), scope="admin")
        secret = send(boss, "post", "/api/v1/agents/secret").json()["secret"]
        from django.test import Client

        holder = Client(headers={"Authorization": f"Bearer {secret}"})
        token = send(holder, "post", "/api/v1/nodes/dgx-01/token").json()["token"]
        machine = Machine("dgx-01", token=token)
        assert machine.post(machine.batch(int(time.time()), gpu_percent=1)).status_code == 200
        again = send(holder, "post", "/api/v1/nodes/dgx-01/token")
        assert again.status_code == 409
        assert "vigil agent enroll dgx-01" in again.json()["detail"]
        assert send(holder, "post", "/api/v1/nodes/dgx-02/token").status_code == 200
        for path in ("/api/v1/jobs", "/api/v1/agents", "/api/v1/nodes/dgx-01/telemetry"):
            assert holder.get(path).status_code == 401, "it is good for nothing else"

    def test_a_machines_token_reports_and_does_nothing_else(self) -> None:
        from django.test import Client

        machine = machine_that_works(seconds=10)
        thief = Client(headers={"Authorization": f"Bearer {machine.token}"})
        reads = ("me", "jobs", "agents", "queue", "gpus", "nodes", "nodes/dgx-01/telemetry", "nodes/dgx-01/gpus")
        assert {path: thief.get(f"/api/v1/{path}").status_code for path in reads} == dict.fromkeys(reads, 401)
        for path in ("nodes/dgx-01/token", "nodes/dgx-02/token", "agents/secret", "jobs"):
            assert send(thief, "post", f"/api/v1/{path}").status_code == 401
        other = Machine("dgx-02")
        assert machine.send(b"{}", node="dgx-02").status_code == 401
        assert other.post(other.facts(time.time())).status_code == 200

    def test_a_secret_runs_out(self) -> None:
        from django.test import Client

        from nodes.models import EnrolmentSecret

        boss = bearer(sysadmin(), scope="admin")
        secret = send(boss, "post", "/api/v1/agents/secret").json()["secret"]
        EnrolmentSecret.objects.update(expires_at=moment(time.time()) - timedelta(seconds=1))
        holder = Client(headers={"Authorization": f"Bearer {secret}"})
        assert send(holder, "post", "/api/v1/nodes/dgx-01/token").status_code == 401

    @pytest.mark.parametrize("name", ["-x", "a b", "x" * 300])
    def test_what_is_no_machines_name(self, name: str) -> None:
        boss = bearer(sysadmin(), scope="admin")
        assert send(boss, "post", f"/api/v1/nodes/{name}/token").status_code == 422
