"""Test who is notified of idle GPUs and of processes on unallocated GPUs: once per occurrence."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from jobs.models import Attempt, Event, Job
from jobs.tasks import waste
from jobs.waste import notices
from nodes.models import Agent, Holding, QueuedJob
from portal.models import Notice, User
from tests.jobs.waste.idling import allocated_job, ends, idle_for, machine, vigils, works
from tests.lab import a_project, bearer, person, signed_in, sysadmin
from tests.nodes.telemetry.reporting import Machine
from vigil_core.formatting import NBSP

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _no_former_notices() -> None:
    notices.forget()


@pytest.fixture
def oskar() -> User:
    return person("oskar", a_project(), slurm_user="oskar")


def notices_of(user: User) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = bearer(user, "read").get("/api/v1/notices").json()["items"]
    return [{**item, "title": item["title"].replace(NBSP, " ")} for item in items]


class TestIdle:
    def test_the_owner_of_a_job_of_vigils_is_notified_once(self, oskar: User) -> None:
        idle = machine(1)
        job = vigils(oskar, "7", name="notebook-oskar")
        allocated_job("7", [0], user="vigil")
        idle_for(idle, 14.2)
        waste()
        waste()
        (notice,) = notices_of(oskar)
        assert notice["title"] == "notebook-oskar has left 1 GPU idle for 14 hours."
        assert notice["detail"] == ("Release it, or explain why it is needed. On dgx-01; no process uses it."), (
            "also without any process"
        )
        assert (notice["link"], notice["kind"]) == (f"/jobs/{job.pk}", "gpu.idle")
        assert Notice.objects.count() == 1
        assert "notebook-oskar has left 1 GPU idle" in signed_in(oskar).get("/").text.replace(NBSP, " ")

    def test_not_of_a_node_that_stands_by_as_requested(self, oskar: User) -> None:
        idle = machine(1, node="dgx-02")
        job = vigils(oskar, "7", name="spared")
        Attempt.objects.filter(job=job).update(nodes=["dgx-01", "dgx-02"])
        Event.objects.create(
            attempt=job.latest, time=timezone.now(), kind="incarnation.started",
            data={"incarnation": 0, "world_size": 1, "nodes": ["dgx-01"]},
        )  # fmt: skip
        allocated_job("7", [0], user="vigil", node="dgx-02")
        idle_for(idle, 14.2)
        waste()
        assert len(notices_of(oskar)) == 1, "nobody requested it"
        Job.objects.filter(pk=job.pk).update(spec={**job.spec, "resources": {"spares": 1}})
        waste()
        assert not notices_of(oskar)

    @pytest.mark.parametrize("nodes", [[], [{}], ["nowhere"], [["dgx-02"], None, 7], "dgx-01", {"dgx-01": 1}])
    def test_what_a_job_reports_of_its_nodes_is_not_taken_on_trust(self, oskar: User, nodes: object) -> None:
        """It excuses no more nodes than were to stand by, and suppresses no other notice."""
        idle_for(machine(1), 14.2)
        idle_for(machine(1, node="dgx-02"), 14.2)
        liar = vigils(oskar, "7", name="liar", spec={"resources": {"spares": 1}})
        Attempt.objects.filter(job=liar).update(nodes=["dgx-01", "dgx-02"])
        Event.objects.create(
            attempt=liar.latest, time=timezone.now(), kind="incarnation.started", data={"nodes": nodes}
        )
        allocated_job("7", [0], user="vigil")
        allocated_job("8", [0], user="oskar", node="dgx-02")
        waste()
        assert len(notices_of(oskar)) == 2

    def test_of_a_foreign_job_whoever_is_its_slurm_user_here(self, oskar: User) -> None:
        idle_for_long = machine(2)
        allocated_job("7", [0, 1], user="oskar", name="jupyter")
        idle_for(idle_for_long, 3)
        waste()
        (notice,) = notices_of(oskar)
        assert notice["title"] == "jupyter has left 2 GPUs idle, the longest for 3 hours."
        assert notice["link"] == "/nodes/dgx-01"
        assert notices_of(sysadmin()) == []

    def test_some_of_many_gpus_and_what_runs_on_them(self, oskar: User) -> None:
        item = machine(2, gpu_percent=[90, 0])
        allocated_job("7", [0, 1], user="oskar", name="train")
        batch = item.batch(int(time.time()) - 5, gpu_percent=[[90] * 10, [0] * 10])
        process = {"gpu": item.gpus[1], "pid": 17, "user": "oskar", "name": "python", "memory_mib": 5, "job": "7"}
        item.post({**batch, "processes": [process]})
        idle_for(item, 1, 1)
        waste()
        (notice,) = notices_of(oskar)
        assert notice["title"] == "train has left 1 of its 2 GPUs idle for 60 minutes."
        assert notice["detail"].endswith("On dgx-01.")

    def test_not_before_a_quarter_of_an_hour(self, oskar: User) -> None:
        item = machine(1)
        allocated_job("7", [0], user="oskar", hours=0.2)
        idle_for(item, 14)
        waste()
        assert notices_of(oskar) == [], "it has had it for only 12 minutes"
        QueuedJob.objects.all().delete()

    def test_withdrawn_when_they_work_again_and_news_when_they_stop(self, oskar: User) -> None:
        item = machine(1)
        allocated_job("7", [0], user="oskar")
        idle_for(item, 1)
        waste()
        works(item, 60, ago_s=5)
        waste()
        assert notices_of(oskar) == []
        works(item, 0, ago_s=0)
        idle_for(item, 0.5)
        waste()
        assert [notice["read_at"] for notice in notices_of(oskar)] == [None]
        assert Notice.objects.count() == 1, "of the same job it is the same notice"

    def test_withdrawn_when_the_job_ends_and_the_next_of_its_number_is_another(self, oskar: User) -> None:
        item = machine(1)
        allocated_job("7", [0], user="oskar")
        idle_for(item, 1)
        waste()
        ends("7")
        waste()
        assert notices_of(oskar) == []
        Holding.objects.update(until=timezone.now() - timedelta(hours=3))
        allocated_job("7", [0], user="oskar", hours=2)
        idle_for(item, 1)
        waste()
        assert len(notices_of(oskar)) == 1
        assert Notice.objects.count() == 2

    def test_a_notice_stands_while_the_machine_is_silent(self, oskar: User) -> None:
        item = machine(1)
        allocated_job("7", [0], user="oskar")
        idle_for(item, 1)
        waste()
        Agent.objects.update(heard_at=timezone.now() - timedelta(minutes=5))
        waste()
        assert len(notices_of(oskar)) == 1, "nothing is known of it"
        ends("7")
        waste()
        assert notices_of(oskar) == []

    def test_sysadmins_are_notified_once_of_people_whom_nobody_knows(self, oskar: User) -> None:
        sam, item = sysadmin(), machine(2)
        allocated_job("7", [0], user="unknown")
        allocated_job("8", [1], user="stranger")
        idle_for(item, 1)
        waste()
        (notice,) = notices_of(sam)
        assert notice["title"] == "2 GPUs are idle but allocated to people without an account here."
        assert signed_in(sam).get(notice["link"]).status_code == 200
        ends("7")
        waste()
        assert [item["title"] for item in notices_of(sam)] == [
            "1 GPU is idle but allocated to people without an account here."
        ]
        ends("8")
        waste()
        assert notices_of(sam) == []

    def test_a_name_is_anybodys_and_shown_as_it_is(self, oskar: User) -> None:
        item = machine(1)
        allocated_job("7", [0], user="oskar", name="<script>alert(1)</script>\n\x1b[31mred")
        idle_for(item, 1)
        waste()
        (notice,) = notices_of(oskar)
        assert "\n" not in notice["title"]
        assert "\x1b" not in notice["title"]
        assert "<script>alert" not in signed_in(oskar).get("/").text

    def test_it_makes_few_queries_where_nothing_is_allocated(self, django_assert_max_num_queries: Any) -> None:
        with django_assert_max_num_queries(7):
            waste()


@pytest.mark.skipif(connection.vendor != "postgresql", reason="On SQLite one writes at a time")
@pytest.mark.django_db(transaction=True)
def test_two_runs_at_once_notify_once() -> None:
    oskar = person("oskar", a_project(), slurm_user="oskar")
    item = machine(1)
    allocated_job("7", [0], user="oskar")
    idle_for(item, 1)
    together = threading.Barrier(4, timeout=60)

    def run(_: int) -> None:
        try:
            together.wait()
            waste()
        finally:
            connection.close()

    with ThreadPoolExecutor(4) as pool:
        assert len(list(pool.map(run, range(4)))) == 4
    assert len(notices_of(oskar)) == 1
    assert Notice.objects.count() == 1


class TestUnheld:
    def process(self, machine: Machine, gpu: int = 0, **more: Any) -> None:
        payload = {
            "gpu": machine.gpus[gpu],
            "pid": 17,
            "user": "ann",
            "name": "python3",
            "memory_mib": 5,
            "job": "",
            **more,
        }
        assert (
            machine.post({**machine.batch(int(time.time()) - 5, gpu_percent=50), "processes": [payload]}).status_code
            == 200
        )

    def raise_after(self, minutes: int) -> None:
        notices.raise_notices(timezone.now() + timedelta(minutes=minutes))

    def test_sysadmins_are_notified_of_a_node_once_it_lasts(self, oskar: User, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Agent, "is_silent", lambda agent, now=None: False)
        sam, item = sysadmin(), machine(2)
        self.process(item)
        self.raise_after(0)
        assert notices_of(sam) == [], "the queue may not have been read since its job began"
        self.raise_after(1)
        (notice,) = notices_of(sam)
        assert notice["title"] == "A process is on GPU 0 of dgx-01, which is not allocated to any job."
        assert notice["detail"] == "python3 (PID 17) of ann."
        assert (notice["link"], notice["kind"]) == ("/nodes/dgx-01", "gpu.unheld")
        assert notices_of(oskar) == []
        self.raise_after(2)
        assert Notice.objects.count() == 1
        item.post(item.batch(int(time.time()), gpu_percent=0), first=None)
        self.raise_after(3)
        assert notices_of(sam) == []

    def test_a_process_on_every_gpu_is_a_single_process(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Agent, "is_silent", lambda agent, now=None: False)
        sam, item = sysadmin(), machine(8)
        named = {"name": "", "user": "", "pid": 4242, "memory_mib": 5, "job": ""}
        there = [{**named, "gpu": uuid} for uuid in item.gpus]
        item.post({**item.batch(int(time.time()) - 5, gpu_percent=50), "processes": there})
        self.raise_after(0)
        self.raise_after(1)
        (notice,) = notices_of(sam)
        assert (
            notice["title"]
            == "A process is on GPUs 0, 1, 2, 3, 4, 5, 6 and 7 of dgx-01, which is not allocated to any job."
        )
        assert notice["detail"] == "PID 4242, user unknown, on 8 GPUs."

    def test_not_of_what_a_job_holds_by_then(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Agent, "is_silent", lambda agent, now=None: False)
        sam, item = sysadmin(), machine(2)
        self.process(item)
        self.raise_after(0)
        allocated_job("7", [0])
        self.raise_after(1)
        assert notices_of(sam) == []
