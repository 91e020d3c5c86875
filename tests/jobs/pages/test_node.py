"""Test a node's page: its sentence, charts, events, processes, jobs and notes, as each person may see them."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from django.conf import LazySettings
from django.test import Client

from jobs import allocations
from jobs.models import Job
from nodes.models import Agent, Gpu, Node, NodeNote
from portal.models import AuditEntry, User
from tests.jobs.api.telemetry.test_machines import moment, running
from tests.jobs.pages.reading import page_text
from tests.lab import a_job, a_project, person, signed_in, sysadmin
from tests.nodes.telemetry.reporting import UUIDS, Machine

pytestmark = pytest.mark.django_db
HOSTILE = "<script>alert(1)</script>"


def raw(user: User, name: str = "dgx-01", query: str = "", **headers: str) -> str:
    answer = signed_in(user).get(f"/nodes/{name}{query}", headers=headers)
    assert answer.status_code == 200
    return answer.content.decode()


def text(user: User, name: str = "dgx-01", query: str = "", **headers: str) -> str:
    return page_text(user, f"/nodes/{name}{query}", **headers)


def script(html: str, name: str) -> dict[str, Any]:
    found = re.search(rf'<script id="{name}" type="application/json">(.*?)</script>', html)
    assert found
    payload: dict[str, Any] = json.loads(found[1])
    return payload


def machine_at_work(*, seconds: int = 60, gpus: int = 2, **more: Any) -> Machine:
    machine, now = Machine(gpus=UUIDS[:gpus]), int(time.time())
    machine.post(machine.facts(now - seconds, cpus=64, **more))
    host = {"cpu_percent": 12.0, "memory_used_mib": 4096, "memory_total_mib": 8192, "mount_ms:/data": 3.0}
    machine.fill(now - seconds, now, gpu_percent=40, memory_mib=20_480, temperature_c=61, watts=300, host=host)
    return machine


@pytest.fixture
def noor() -> User:
    return person("noor", a_project("other"), slurm_user="noor")


@pytest.fixture
def job(mira: User) -> Job:
    """Return mira's job, on GPU 0 for the last 50 s."""
    User.objects.filter(pk=mira.pk).update(slurm_user="mira")
    mira.refresh_from_db()
    return a_job(mira, a_project(), state="running", name="wren")


def allocate(job: Job) -> None:
    running(job, seconds=50)
    allocations.update()


def test_a_machine_that_only_its_agent_knows(mira: User) -> None:
    machine_at_work()
    html = text(mira)
    assert "unknown to the scheduler" in html
    assert "2 of 2 GPUs are busy, 40 % on average." in html
    assert "The hottest is at 61 °C." in html
    assert "0.6 kW" in html
    assert "4 <small>of 8 GiB</small>" in html
    assert "Drain…" not in text(sysadmin())


def test_charts_of_gpus_and_of_the_machine(mira: User) -> None:
    gpus = [
        {"uuid": uuid, "index": i, "name": "H100", "memory_mib": 81_920, "slowdown_c": 87, "power_cap_watts": 700}
        for i, uuid in enumerate(UUIDS[:2])
    ]
    machine = Machine(gpus=UUIDS[:2])
    now = int(time.time())
    machine.post(machine.facts(now - 60, gpus=gpus))
    machine.fill(now - 60, now, gpu_percent=40, temperature_c=61, watts=300, host={"cpu_percent": 9})
    drawn = script(raw(mira), "node-charts")
    assert drawn["node"] == "dgx-01"
    assert [figure["series"][0]["name"] for figure in drawn["figures"]] == [
        *["gpu_percent", "memory_mib", "temperature_c", "watts"] * 2, "cpu_percent",
    ]  # fmt: skip
    assert [figure["limits"] for figure in drawn["figures"][:4]] == [
        [], [], [{"label": "", "value": 87}], [{"label": "", "value": 700}],
    ]  # fmt: skip
    assert "°C of 87" in text(mira)
    assert '<span class="readout"><b>61</b></span>' in raw(mira), "without a script the newest values are there"


def test_a_broken_gpu_is_marked_at_its_charts(mira: User) -> None:
    machine_at_work()
    assert ">broken</span>" not in text(mira)
    Gpu.objects.filter(index=1).update(fault="has a row remap that failed")
    assert text(mira).count("broken</span>") == 1
    assert 'title="It has a row remap that failed."' in text(mira)


@pytest.mark.parametrize(
    ("query", "span"),
    [
        ("", {"seconds": 3600}),
        ("?range=30d", {"seconds": 30 * 86_400}),
        ("?range=5d", {"seconds": 3600}),
        ("?from=1000&to=2000", {"from": 1000, "to": 2000}),
        ("?from=2000&to=1000", {"seconds": 3600}),
        ("?from=-1&to=9e9", {"seconds": 3600}),
        ("?from=1&to=99999999999999999999", {"seconds": 3600}),
    ],
)
def test_the_stretch_of_time_is_in_the_address(mira: User, query: str, span: dict[str, int]) -> None:
    machine_at_work(seconds=10)
    assert script(raw(mira, query=query), "marks")["span"] == span


def test_events_are_described_and_marked(mira: User) -> None:
    machine, now = machine_at_work(), time.time()
    message = f"pid=7, name={HOSTILE}, GPU has fallen off the bus."
    machine.post(machine.event("xid", now - 30, gpu=UUIDS[1], xid=79, seq=4, text=message, confirmed=True))
    machine.post(machine.event("mount.slow", now - 40, mount=f"/{HOSTILE}"))
    machine.post(machine.event("agent.gap", now - 20, **{"from": now - 200, "to": now - 100, "batches": 10}))
    html = raw(mira)
    assert HOSTILE not in html
    shown = text(mira)
    assert "Xid 79 on GPU 1," in shown
    assert "have been" not in shown
    assert f"/{HOSTILE} was slow" in shown
    assert "confirmed by NVML" in shown
    marks = {title: (at, until, uuid, tone) for at, until, uuid, tone, title, _ in script(html, "marks")["marks"]}
    assert marks["Xid 79: GPU fell off the bus"][2:] == (UUIDS[1], "failed")
    assert marks["Samples are missing"][:2] == pytest.approx((now - 200, now - 100), abs=1)
    assert any(until is None for _, until, _, _ in marks.values()), "the mount still is"
    past = script(raw(mira, query=f"?from={int(now) - 9000}&to={int(now) - 8000}"), "marks")["marks"]
    assert past == []


def test_a_shared_file_system_that_was_slow_on_several_nodes_is_a_single_finding(mira: User) -> None:
    now = time.time()
    for name in ("dgx-01", "dgx-02"):
        machine = Machine(name, gpus=())
        machine.post(machine.event("mount.slow", now - 600, mount="/data", source="nfs01:/export", since=now - 600))
        machine.post(machine.event("mount.well", now - 60, mount="/data", seconds=540))
    assert "nfs01 was slow for 9 min on 2 nodes" in text(mira)


def test_processes_with_hostile_names(mira: User, job: Job) -> None:
    machine, now = machine_at_work(), int(time.time())
    allocate(job)
    process = {"gpu": UUIDS[0], "pid": 5, "user": "mira", "name": HOSTILE, "memory_mib": 512, "job": str(job.pk)}
    stray = {"gpu": UUIDS[1], "pid": 6, "user": "oskar", "name": "", "memory_mib": None, "job": ""}
    machine.post({**machine.batch(now, gpu_percent=40), "processes": [stray, process]})
    assert HOSTILE not in raw(mira)
    html = text(mira)
    assert f"<code>{HOSTILE}</code>" in html
    assert f'<a href="/jobs/{job.pk}">wren</a>' in html
    assert "no job" in html


def test_past_allocations(mira: User, job: Job) -> None:
    machine_at_work()
    allocate(job)
    (band,) = script(raw(mira), "marks")["bands"][UUIDS[0]]
    assert band[1:] == [None, "mine", "wren (mira)"]
    html = text(mira)
    assert "Jobs that ran here" in html
    assert f'<a class="name" href="/jobs/{job.pk}">wren</a>' in html
    assert "not allocated" in html, "the other one"


def test_a_job_without_gpus_ran_here_too(mira: User) -> None:
    machine_at_work()
    attempt = {"nodes": ["dgx-01"], "started_at": moment(time.time() - 500), "ended_at": moment(time.time() - 100)}
    a_job(mira, a_project(), name="cpu-only", attempt=attempt)
    a_job(mira, a_project(), name="elsewhere", attempt={**attempt, "nodes": ["dgx-011"]})
    html = text(mira)
    assert ">cpu-only</a>" in html
    assert "elsewhere" not in html


class TestOthers:
    """A site that hides other people's jobs also hides what their GPUs do and who uses them."""

    @pytest.fixture(autouse=True)
    def _others_are_hidden(self, settings: LazySettings, job: Job) -> None:
        settings.VIGIL_QUEUE_VISIBLE = "own"
        machine, now = machine_at_work(), int(time.time())
        allocate(job)
        process = {"gpu": UUIDS[0], "pid": 5, "user": "mira", "name": "secret.py", "memory_mib": 5, "job": str(job.pk)}
        machine.post({**machine.batch(now, gpu_percent=[[97] * 10, [40] * 10]), "processes": [process]})
        machine.post(machine.event("xid", now, gpu=UUIDS[0], xid=31, seq=1, text="pid=5, name=secret.py"))

    def test_from_a_stranger(self, noor: User) -> None:
        html = text(noor)
        for secret in ("wren", "mira", "secret.py", "<b>97</b>"):
            assert secret not in html, secret
        assert "Xid 31 on GPU 0," in html
        assert "hidden: used by somebody else" in html
        assert "Its GPUs were also used by other people" in html
        (band,) = script(raw(noor), "marks")["bands"][UUIDS[0]]
        assert band[2:] == ["busy", "in use"]

    def test_not_from_its_owner_and_sysadmins(self, mira: User) -> None:
        for user in (mira, sysadmin()):
            html = text(user)
            assert "secret.py" in html
            assert "<b>97</b>" in html
            assert ">wren</a>" in html

    def test_a_link_only_where_the_job_is_visible(self, settings: LazySettings, noor: User, job: Job) -> None:
        settings.VIGIL_QUEUE_VISIBLE = "everyone"
        html = text(noor)
        assert "wren" in html
        assert f"/jobs/{job.pk}" not in html


def test_machines_without_agent_or_gpus(mira: User) -> None:
    Node.objects.create(name="cpu-01", state="idle", cpus=64)
    html = text(mira, "cpu-01")
    assert "Schedulable: 64 of 64 CPUs free." in html
    assert "<code>vigil agent enroll cpu-01</code>" in html
    assert "node.js" not in html
    machine = Machine("cpu-01", gpus=())
    machine.post(machine.batch(int(time.time()), n=0, host={"cpu_percent": 12}))
    html = text(mira, "cpu-01")
    assert "Its CPUs are 12 % busy; it has no GPU. <span" in html
    assert "vigil agent enroll" not in html
    assert 'class="lanes"' not in html


def test_an_agent_that_has_not_reported_anything(mira: User) -> None:
    Machine("dgx-09")
    html = text(mira, "dgx-09")
    assert "Its agent has not reported yet." in html
    assert "No samples yet" in html


def test_a_made_up_machine_stays_as_it_is(mira: User) -> None:
    Node.objects.create(name="dgx-02", state="idle", gpus=8, is_made_up=True)
    html = text(mira, "dgx-02")
    assert "demo node" in html
    assert "vigil agent" not in html


def test_silence_comes_first(mira: User) -> None:
    machine_at_work()
    Agent.objects.update(heard_at=moment(time.time() - 900))
    assert "No report for 15 min" in text(mira)
    Agent.objects.update(is_made_up=True)
    assert "No report for" not in text(mira)


def test_topology_is_a_folded_matrix(mira: User) -> None:
    machine = machine_at_work(topology=[["X", "NV18"], [HOSTILE, "X"]])
    html = text(mira)
    assert "<td>NV18</td>" in html
    assert HOSTILE not in raw(mira)
    for nonsense in ("NV18", [["X"]], [["X", "NV18"], ["X"]], [[], []], 7):
        machine.post(machine.facts(time.time(), topology=nonsense))
        assert "How its GPUs are connected" not in text(mira)


def test_a_swapped_gpu_shows_as_long_as_the_time_reaches_back(mira: User) -> None:
    machine = machine_at_work(seconds=300)
    machine.gpus = (UUIDS[0], UUIDS[5])
    machine.post(machine.facts(time.time() - 100))
    ids = [figure["id"] for figure in script(raw(mira), "node-charts")["figures"] if figure.get("gpu")]
    assert len(ids) == len(set(ids)) == 3 * 4
    now = int(time.time())
    assert len(script(raw(mira, query=f"?from={now - 50}&to={now}"), "node-charts")["figures"]) == 2 * 4 + 3


class TestAgain:
    """The page gets small changes every few seconds; these tests show when it is rendered again instead."""

    HEADERS = {"HX-Request": "true", "HX-Target": "live"}

    def test_only_what_changes(self, mira: User) -> None:
        machine_at_work()
        gpus = script(raw(mira), "node-charts")["gpus"]
        html = raw(mira, **self.HEADERS, **{"X-Page-GPUs": gpus})
        assert "<html" not in html
        for part in ('id="ranges"', 'id="node-marks"', 'id="below"', 'class="say"'):
            assert part in html
        assert 'id="node-charts"' not in html

    def test_another_set_of_gpus(self, mira: User) -> None:
        machine = machine_at_work()
        gpus = script(raw(mira), "node-charts")["gpus"]
        machine.gpus = UUIDS[:3]
        machine.post(machine.facts(time.time()))
        answer = signed_in(mira).get("/nodes/dgx-01", headers={**self.HEADERS, "X-Page-GPUs": gpus})
        assert (answer.status_code, answer.headers["HX-Refresh"]) == (204, "true")

    def test_an_agent_has_come(self, mira: User) -> None:
        Node.objects.create(name="dgx-01", state="idle", gpus=8)
        assert "say" in raw(mira, **self.HEADERS)
        machine_at_work(seconds=10)
        assert signed_in(mira).get("/nodes/dgx-01", headers=self.HEADERS).headers["HX-Refresh"] == "true"


class TestNotes:
    def test_sysadmins_write_and_remove_them(self, mira: User) -> None:
        machine_at_work(seconds=10)
        boss = sysadmin("ops")
        client = signed_in(boss)
        assert client.post("/nodes/dgx-01/notes", {"text": f" Fan 3 {HOSTILE}\n"}).url == "/nodes/dgx-01#h-notes"
        note = NodeNote.objects.get()
        assert (note.node, note.text, note.by) == ("dgx-01", f"Fan 3 {HOSTILE}", boss)
        assert HOSTILE not in raw(mira)
        assert f"Fan 3 {HOSTILE}" in text(mira)
        assert "Add note" not in text(mira)
        client.post(f"/nodes/dgx-01/notes/{note.pk}/remove")
        assert not NodeNote.objects.exists()
        assert [*AuditEntry.objects.order_by("pk").values_list("user__username", "action", "thing")] == [
            ("ops", "node_note.added", "dgx-01"), ("ops", "node_note.removed", "dgx-01"),
        ]  # fmt: skip

    def test_nobody_else_does(self, mira: User) -> None:
        machine_at_work(seconds=10)
        note = NodeNote.objects.create(node="dgx-01", text="fan")
        client = signed_in(mira)
        assert client.post("/nodes/dgx-01/notes", {"text": "x"}).status_code == 403
        assert client.post(f"/nodes/dgx-01/notes/{note.pk}/remove").status_code == 403
        assert NodeNote.objects.count() == 1
        assert (
            signed_in(sysadmin(), enforce_csrf_checks=True).post("/nodes/dgx-01/notes", {"text": "x"}).status_code
            == 403
        )

    @pytest.mark.parametrize("text_sent", ["", "  ", "\0", "x" * 1001])
    def test_what_is_no_note(self, text_sent: str) -> None:
        machine_at_work(seconds=10)
        boss = signed_in(sysadmin())
        boss.post("/nodes/dgx-01/notes", {"text": text_sent})
        assert not NodeNote.objects.exists()
        assert "Write a note of at most 1,000 characters." in boss.get("/nodes/dgx-01").content.decode()

    def test_about_what_is_not_there(self) -> None:
        boss = signed_in(sysadmin())
        assert boss.post("/nodes/nowhere/notes", {"text": "x"}).status_code == 404
        assert boss.post(f"/nodes/nowhere/notes/{10**30}/remove").status_code == 404
        assert boss.get("/nodes/nowhere/notes").status_code == 405


def test_nobody_sees_it_without_signing_in() -> None:
    machine_at_work(seconds=10)
    assert Client().get("/nodes/dgx-01").status_code == 302
