"""Test a job's GPUs: the tab with its map, from agents or launchers, and the finding that they are mostly idle."""

from __future__ import annotations

import json
import re
import time
from html import unescape
from typing import Any

import numpy as np
import pytest
from django.core.cache import cache

from jobs import allocations
from jobs.models import Event, Job, Stream
from nodes.models import Holding
from portal.models import User
from portal.series import store
from portal.series.store import NewPoints
from tests.jobs.api.telemetry.test_machines import moment, running
from tests.jobs.pages.reading import unwrapped
from tests.lab import a_job, a_project, person, signed_in
from tests.nodes.telemetry.reporting import UUIDS, Machine

pytestmark = pytest.mark.django_db
HOUR_S = 3600


def page(user: User, job: Job, query: str = "", **headers: str) -> str:
    answer = signed_in(user).get(f"/jobs/{job.pk}/gpus{query}", headers=headers)
    assert answer.status_code == 200
    return unwrapped(answer.content.decode())


def drawn(html: str) -> dict[str, Any]:
    found = re.search(r'<script id="heat-data" type="application/json">(.*?)</script>', html)
    assert found
    payload: dict[str, Any] = json.loads(unescape(found[1]).replace(r"\u00a0", " "))
    return payload


def working(job: Job, *percents: int, seconds: int = 600) -> Machine:
    """Report the use of GPUs i, each for the last so many seconds."""
    machine, now = Machine(gpus=UUIDS[: len(percents)]), int(time.time())
    machine.post(machine.facts(now - seconds))
    rows = [[percent] * 10 for percent in percents]
    machine.fill(now - seconds, now, gpu_percent=rows, watts=300, memory_mib=20_480, temperature_c=61)
    running(job, seconds=seconds, indices=tuple(range(len(percents))))
    allocations.update()
    return machine


def losing(job: Job, seconds: int) -> None:
    """Report a step every ten seconds, with a loss that falls by one."""
    assert job.latest is not None
    began, steps = time.time() - seconds, seconds // 10
    ids = store.declare(("attempt", job.latest.pk), ["loss"])
    runs = [(0, began + 10 * step, 1) for step in range(steps)]
    store.append(ids, [NewPoints("loss", 0, runs, np.arange(steps), 100.0 - np.arange(steps))])


def launched(job: Job, percent: float, seconds: int = 300) -> None:
    """Report a launcher's samples of its node's GPUs together."""
    assert job.latest is not None
    began = time.time() - seconds
    job.latest.started_at = moment(began)
    job.latest.save()
    Stream.objects.create(attempt=job.latest, uid="a" * 16, incarnation=0, rank=-1, node="dgx-01")
    ids = store.declare(("attempt", job.latest.pk), ["gpu_percent"])
    count = seconds // 10
    runs = [(-1, began + 10 * i, 1) for i in range(count)]
    store.append(ids, [NewPoints("gpu_percent", 0, runs, np.arange(0, seconds, 10), np.full(count, percent))])


def test_every_gpu_is_a_row_and_who_stands_out_is_named(mira: User) -> None:
    job = a_job(mira, a_project(), state="running")
    working(job, 80, 82, 81, 20)
    html = page(mira, job)
    assert "4 GPUs: utilisation 66 % on average." in html
    assert "GPU 3 of dgx-01 stands out with 20 %." in html
    assert "each GPU, as reported by its node’s agent" in html
    report = drawn(html)
    (group,) = report["groups"]
    assert [(row["label"], row["note"], row["odd"]) for row in group["rows"]] == [
        ("GPU 0", "80 %", False), ("GPU 1", "82 %", False), ("GPU 2", "81 %", False), ("GPU 3", "20 %", True),
    ]  # fmt: skip
    assert {value for value in group["rows"][3]["values"] if value is not None} == {20}
    assert f'height="{4 * 18 + 6 + 22}"' in html, "its place is kept"
    assert '<td class="num">20 %</td>' in html, "the table behind it"


@pytest.mark.parametrize(
    ("field", "summary", "high"),
    [("memory_mib", "memory 20.0 GiB", 20), ("temperature_c", "temperature 61 °C", 65), ("watts", "power 300 W", 300)],
)
def test_what_is_shown_is_in_the_address(mira: User, field: str, summary: str, high: float) -> None:
    job = a_job(mira, a_project(), state="running")
    working(job, 80, 80)
    html = page(mira, job, f"?field={field}")
    assert f"2 GPUs: {summary} on average." in html
    assert (drawn(html)["field"], drawn(html)["high"]) == (field, high)
    assert drawn(page(mira, job, "?field=loss&from=7&to=3"))["field"] == "gpu_percent"


def test_the_loss_is_of_the_steps_of_the_same_time(mira: User) -> None:
    job = a_job(mira, a_project(), state="running")
    working(job, 80)
    losing(job, 600)
    whole = drawn(page(mira, job))["loss"]
    assert (whole["step"][0], len(whole["step"])) == (0, 60)
    now = int(time.time())
    part = drawn(page(mira, job, f"?from={now - 300}&to={now - 100}"))
    assert part["width"] == 1
    assert part["loss"]["step"][0] in range(29, 32)
    assert part["loss"]["step"][-1] in range(48, 51)
    assert part["loss"]["value"][0] == 100 - part["loss"]["step"][0]
    assert drawn(page(mira, job, "?from=7&to=9"))["loss"] is None


def test_ranks_come_from_the_reports_of_launchers(mira: User) -> None:
    job = a_job(mira, a_project(), state="running")
    working(job, 80, 80)
    payload = {"gpus": [{"local_rank": 0, "uuid": UUIDS[1]}, {"local_rank": 1, "uuid": UUIDS[0]}]}
    Event.objects.create(attempt=job.latest, time=moment(time.time()), kind="gpus", rank=-1, data=payload)
    (group,) = drawn(page(mira, job))["groups"]
    assert [(row["key"], row["label"]) for row in group["rows"]] == [("dgx-01:0", "rank 1"), ("dgx-01:1", "rank 0")]


@pytest.mark.parametrize("data", [{}, {"gpus": "x"}, {"gpus": [7, {"uuid": ["x"]}]}, {"gpus": [{"uuid": "\x1b"}] * 99}])
def test_nonsense_of_a_launcher_names_no_ranks(mira: User, data: dict[str, Any]) -> None:
    job = a_job(mira, a_project(), state="running")
    working(job, 80)
    Event.objects.create(attempt=job.latest, time=moment(time.time()), kind="gpus", rank=-1, data=data)
    (group,) = drawn(page(mira, job))["groups"]
    assert group["rows"][0]["label"] == "GPU 0"


def test_launchers_report_where_no_agent_does(mira: User) -> None:
    job = a_job(mira, a_project(), state="running")
    launched(job, 55.0)
    html = page(mira, job)
    assert "Its GPUs: utilisation 55 % on average." in html
    assert "as logged by the job’s launchers" in html
    assert "all GPUs of a node combined" in html
    assert "Launchers do not log temperature" in page(mira, job, "?field=temperature_c")


def test_nothing_is_reported_yet(mira: User) -> None:
    html = page(mira, a_job(mira, a_project(), state="running"))
    assert "No GPU samples yet. Node agents or launchers send them within seconds" in html
    assert "<canvas" not in html
    assert "Neither node agents nor launchers sent any while the job ran" in page(
        mira, a_job(mira, a_project(), state="failed")
    )


def test_a_strangers_job_does_not_exist(mira: User) -> None:
    job = a_job(mira, a_project(), state="running")
    assert signed_in(person("noor", a_project("other"))).get(f"/jobs/{job.pk}/gpus").status_code == 404


def test_only_what_changes_is_sent_again(mira: User) -> None:
    job = a_job(mira, a_project(), state="running")
    working(job, 80)
    part = page(mira, job, **{"HX-Request": "true", "HX-Target": "gpu-summary"})
    assert "<html" not in part
    assert drawn(part)["groups"]


class TestTab:
    TAB = "/gpus"

    def has(self, user: User, job: Job) -> bool:
        return f'href="/jobs/{job.pk}/gpus"' in signed_in(user).get(f"/jobs/{job.pk}/attempts").content.decode()

    @pytest.mark.parametrize("kind", ["distributed", "script", "attached"])
    def test_every_kind_of_job_with_gpus(self, mira: User, kind: str) -> None:
        allocated, request, without, waits = (
            a_job(mira, a_project(), state=state, kind=kind, spec=spec)
            for state, spec in (
                ("running", {}),
                ("completed", {"resources": {"nodes": 1, "gpus_per_node": 2}}),
                ("completed", {}),
                ("pending", {"resources": {"nodes": 1, "gpus_per_node": 2}}),
            )
        )
        working(allocated, 80)
        assert [self.has(mira, job) for job in (allocated, request, without, waits)] == [True, True, False, False]
        launched(without, 5.0)
        assert self.has(mira, without)


class TestFinding:
    """Used less than 30 % over an hour, whatever kind of job it is."""

    LOW = "on average over an hour, less than 30 %."

    def shows(self, user: User, job: Job) -> str:
        cache.clear()
        text = signed_in(user).get(f"/jobs/{job.pk}").content.decode().replace("\N{NO-BREAK SPACE}", " ")
        part = signed_in(user).get(f"/jobs/{job.pk}/life?tab=overview").content.decode()
        assert ("Low GPU use" in text) == ("Low GPU use" in part)
        return text

    def test_shown_with_a_link_to_the_tab(self, mira: User) -> None:
        job = a_job(mira, a_project(), state="running")
        working(job, 10, 20, seconds=HOUR_S + 120)
        for kind in ("distributed", "script", "attached"):
            Job.objects.filter(pk=job.pk).update(kind=kind)
            html = self.shows(mira, job)
            assert f"Its 2 GPUs were used 15 % {self.LOW}" in html
            assert f'<a href="/jobs/{job.pk}/gpus">See which, and when</a>' in html
        assert f"used 15 % {self.LOW}" in page(mira, job)

    def test_by_launchers_too(self, mira: User) -> None:
        job = a_job(mira, a_project(), state="running", kind="script")
        launched(job, 12.0, HOUR_S + 60)
        assert f"Its GPUs were used 12 % {self.LOW}" in self.shows(mira, job)

    def test_nothing_where_all_is_well_or_unknown(self, mira: User) -> None:
        busy, young, unknown = (a_job(mira, a_project(), state="running") for _ in range(3))
        working(busy, 60, seconds=HOUR_S + 120)
        launched(young, 5.0, 1800)
        assert unknown.latest is not None
        unknown.latest.started_at = moment(time.time() - 2 * HOUR_S)
        unknown.latest.save()
        for job in (busy, young, unknown):
            assert self.LOW not in self.shows(mira, job)
        Holding.objects.all().delete()
        assert self.LOW not in self.shows(mira, busy)

    def test_nothing_is_concluded_from_an_incomplete_hour(self, mira: User) -> None:
        job = a_job(mira, a_project(), state="running")
        working(job, 5, seconds=1800)
        assert job.latest is not None
        job.latest.started_at = moment(time.time() - 2 * HOUR_S)
        job.latest.save()
        assert self.LOW not in self.shows(mira, job)


def warned(user: User, job: Job) -> str:
    html = signed_in(user).get(f"/jobs/{job.pk}").content.decode()
    return " ".join(unescape(html.partition('<div id="warnings">')[2].partition('<div id="newest">')[0]).split())


def test_the_xids_of_its_gpus_are_among_its_warnings(mira: User) -> None:
    """They are shown only for GPUs and times of the allocation, and without echoes of another Xid."""
    job = a_job(mira, a_project(), state="running")
    machine, now = Machine(), int(time.time())
    machine.post(machine.facts(now - 600))
    running(job)
    allocations.update()
    assert "Xid" not in warned(mira, job)
    reports = [
        (UUIDS[1], 48, now - 30),
        (UUIDS[0], 63, now - HOUR_S),
        (UUIDS[0], 79, now - 20),
        (UUIDS[0], 45, now - 19),
    ]
    xids = [machine.event("xid", at, gpu=gpu, xid=xid, seq=n) for n, (gpu, xid, at) in enumerate(reports, 1)]
    machine.post(*xids, machine.event("gpu.lost", now - 10, gpu=UUIDS[0]))
    shown = warned(mira, job)
    assert "Xid 79: GPU fell off the bus (GPU 0 of dgx-01)" in shown
    assert "GPU 0 of dgx-01 was lost" in shown
    assert not [xid for xid in (45, 48, 63) if f"Xid {xid}" in shown]


def test_an_xid_of_a_gpu_that_it_was_allocated_twice(mira: User) -> None:
    """The job had the GPU in both periods; what happened to the GPU between them is not shown."""
    job = a_job(mira, a_project(), state="running")
    machine, now = working(job, 80), int(time.time())
    first = Holding.objects.get()
    again, first.since, first.until = moment(now - 100), moment(now - 290), moment(now - 200)
    first.save()
    more = {name: getattr(first, name) for name in ("gpu", "agent", "scheduler_id", "user", "source")}
    Holding.objects.create(since=again, **more)
    xids = [(now - 250, 79), (now - 150, 48)]
    machine.post(*(machine.event("xid", at, gpu=UUIDS[0], xid=xid, seq=n) for n, (at, xid) in enumerate(xids, 1)))
    shown = warned(mira, job)
    assert "Xid 79" in shown
    assert "Xid 48" not in shown


def test_an_echo_alone_is_shown(mira: User) -> None:
    job = a_job(mira, a_project(), state="running")
    machine, now = working(job, 80), int(time.time())
    machine.post(machine.event("xid", now - 9, gpu=UUIDS[0], xid=45, seq=1))
    assert "Xid 45" in warned(mira, job)


def figures(user: User, job: Job) -> list[dict[str, Any]]:
    html = signed_in(user).get(f"/jobs/{job.pk}").content.decode()
    found = re.search(r'<script id="figures" type="application/json">(.*?)</script>', html)
    assert found
    payload: list[dict[str, Any]] = json.loads(unescape(found[1]))
    return payload


def test_metrics_of_gpus_from_a_launcher_have_separate_charts(mira: User) -> None:
    """They belong to the launcher's stream and go over seconds, as its CPU does, not over the script's steps."""
    job = a_job(mira, a_project(), state="running", kind="script")
    assert [figure["id"] for figure in figures(mira, job)] == ["cpu_cores", "memory_gib"]
    launched(job, 55.0)
    losing(job, 300)
    drawn = figures(mira, job)
    assert [figure["id"] for figure in drawn] == ["loss", "gpu_percent", "cpu_cores", "memory_gib"]
    assert [(figure["title"], figure["rank"], figure["xunit"]) for figure in drawn[1:2]] == [("GPUs", -1, "second")]
    assert [figure["height"] for figure in drawn[1:]] == [220, 120, 120]
