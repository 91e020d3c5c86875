"""Test what a job's page shows of its efficiency, from its trainer's reports."""

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from jobs.intake import reports
from jobs.models import Event, Job
from portal.models import Project, User
from portal.series import store
from portal.series.store import NewPoints
from tests.jobs.pages.reading import text
from tests.jobs.reporting import Spooled, attempt_of, post
from tests.lab import a_job
from tests.nodes.telemetry.reporting import Machine

pytestmark = pytest.mark.django_db
VERDICT: dict[str, Any] = {
    "bound": "input", "because": "32 % of a step is spent waiting for data.", "remedy": "Put the data elsewhere.",
    "steps": 100, "last_step": 250, "step_seconds": 2.0, "mfu": 0.412, "busy": 0.61, "matmul": 0.58,
    "sampled_step": 240,
    "split": {"forward": 0.5, "backward": 0.8, "optimizer": 0.0594, "data": 0.64, "other": 0.0006},
}  # fmt: skip


@pytest.fixture
def job(mira: User, project: Project) -> Job:
    return a_job(mira, project, state="running")


def add_event(job: Job, kind: str, *, rank: int = 0, **data: Any) -> None:
    Event.objects.create(attempt=job.latest, time=timezone.now(), kind=kind, rank=rank, incarnation=0, data=data)


def page(client: Client, job: Job) -> str:
    return text(client.get(f"/jobs/{job.pk}"))


def test_shows_what_bounds_it_and_where_the_time_of_a_step_goes(client: Client, job: Job) -> None:
    add_event(job, "run.verdict", **{**VERDICT, "bound": "compute"})
    add_event(job, "run.verdict", **VERDICT)
    add_event(job, "run.verdict", rank=3, **{**VERDICT, "bound": "host"})  # not rank 0's
    shown = page(client, job)
    for words in (
        "Bound by input", "32 % of a step is spent waiting for data.", "Put the data elsewhere.", "41.2 %",
        "100 steps, to step 250, 2 s each",
        "A step of 2 s: forward 25.0 %, backward 40.0 %, optimizer 3 %, waiting for data 32.0 %, other &lt; 0.1 %.",
    ):  # fmt: skip
        assert words in shown
    assert "Bound by input" in text(client.get(f"/jobs/{job.pk}/life?tab=overview"))
    assert "Bound by" not in text(client.get(f"/jobs/{job.pk}/life?tab=logs"))


def test_a_straggler_is_what_holds_it_up(client: Client, job: Job) -> None:
    add_event(
        job, "run.verdict", **{**VERDICT, "bound": "straggler", "because": "Rank 3 takes 14.0 times the usual time."}
    )
    assert "Delayed by one rank" in page(client, job)
    assert "Rank 3 takes 14.0 times" in page(client, job)


def test_words_that_come_late_are_not_the_newest(client: Client, job: Job) -> None:
    """After an outage streams are posted in any order, and a spool may be read once the next attempt runs."""
    second = attempt_of(job, number=2, started_at=timezone.now())
    late = Spooled().add_event("run.verdict", **{**VERDICT, "bound": "host"})
    newest = Spooled(incarnation=1).add_event("run.verdict", **VERDICT)
    reports.ingest(second.pk, post(newest, late))
    before = Spooled().add_event("run.verdict", **{**VERDICT, "bound": "memory"})
    reports.ingest(job.latest.pk, post(before))  # type: ignore[union-attr]
    shown = page(client, job)
    assert "Bound by input" in shown


def test_explains_that_too_little_is_measured(client: Client, mira: User, project: Project, job: Job) -> None:
    assert "The analysis needs 20 steps" in page(client, job)
    add_event(job, "run.verdict", bound=None, because="Not enough measured yet: 6 steps.", remedy="no", split={})
    shown = page(client, job)
    assert ">Bottleneck<" in shown
    assert "Not enough measured yet: 6 steps." in shown
    assert "The job ended before enough steps were measured." in page(client, a_job(mira, project, state="failed"))
    for other in (a_job(mira, project, state="pending"), a_job(mira, project, state="running", kind="script")):
        assert ">Bottleneck<" not in page(client, other)


def test_shows_goodput(client: Client, job: Job) -> None:
    stream = Spooled()
    for step in range(1, 76):
        stream.log(step, step_seconds=2.0)
    reports.ingest(job.latest.pk, post(stream))  # type: ignore[union-attr]
    shown = page(client, job)
    assert "Goodput</dt><dd>50" in shown or "Goodput</dt><dd>49.9" in shown
    assert "2 min 30 s of useful steps in 5 min" in shown


def test_a_job_that_ended_before_its_first_step_has_nothing_measured(
    client: Client, mira: User, project: Project
) -> None:
    shown = page(client, a_job(mira, project, state="failed"))
    assert "The job ended before enough steps were measured." in shown
    assert "h-measured" not in shown


NONSENSE: list[dict[str, Any]] = [
    {},
    {"bound": "<script>", "because": "<b>x</b>", "remedy": 7, "split": []},
    {"bound": ["input"], "split": {"forward": "1", "evil": 3, "backward": -1, "other": True}},
    {"bound": "input", "split": {"forward": 1e300}, "mfu": 17, "busy": -1, "steps": 1.5, "last_step": "x"},
]


@pytest.mark.parametrize("data", NONSENSE)
def test_what_makes_no_sense_is_left_out(client: Client, job: Job, data: dict[str, Any]) -> None:
    add_event(job, "run.verdict", **data)
    shown = page(client, job)
    assert "<script>" not in shown
    assert "<b>x" not in shown
    assert "MFU</dt>" not in shown


def test_charts_of_what_there_is(client: Client, job: Job) -> None:
    def charts() -> list[str]:
        return [figure["id"] for figure in client.get(f"/jobs/{job.pk}").context["figures"]]

    usual = ["loss", "speed", "gradient_norm", "step_seconds"]
    assert charts() == usual
    reports.ingest(job.latest.pk, post(Spooled().log(1, mfu=0.4, communication_share=0.1)))  # type: ignore[union-attr]
    assert charts() == [*usual[:2], "mfu", "communication_share", *usual[2:]]


def test_a_slow_mount_is_marked_on_the_steps_done_meanwhile(client: Client, job: Job) -> None:
    """Only alerts on its own nodes while it ran count, and a mount that two of them share counts once."""
    attempt = job.latest
    assert attempt is not None
    began = time.time() - 600
    attempt.started_at, attempt.nodes = datetime.fromtimestamp(began, UTC), ["dgx-01", "dgx-02"]
    attempt.save()
    ids = store.declare(("attempt", attempt.pk), ["tokens_per_second"])
    runs = [(0, began + 10 * step, 1) for step in range(60)]
    store.append(ids, [NewPoints("tokens_per_second", 0, runs, np.arange(60), np.full(60, 9.0))])
    for node in ("dgx-01", "dgx-02", "dgx-03"):
        machine = Machine(node)
        machine.post(machine.event("mount.slow", began + 100, mount="/<b>data</b>", since=began + 100))
        machine.post(machine.event("mount.well", began + 220, mount="/<b>data</b>", seconds=120))
    answer = client.get(f"/jobs/{job.pk}")
    ((first, last, words),) = answer.context["marks"]["slow"]
    assert (round(first), round(last)) == (10, 22)
    assert words == "/<b>data</b> was slow for 2\N{NO-BREAK SPACE}min"
    assert "/&lt;b&gt;data&lt;/b&gt; was slow for 2 min" in text(answer)
    assert "<b>data" not in text(answer)
    attempt.nodes = ["dgx-04"]
    attempt.save()
    assert "slow" not in client.get(f"/jobs/{job.pk}").context["marks"]


def test_slow_mounts_of_many_attempts_are_queried_at_once(client: Client, job: Job) -> None:
    """An attempt shows the alerts of its own nodes and time."""
    began = time.time() - 6_000
    for number in range(2, 8):
        at = datetime.fromtimestamp(began + 600 * number, UTC)
        nodes, ended = [f"dgx-0{number}"], at + timedelta(seconds=500)
        attempt_of(job, number=number, state="failed", started_at=at, ended_at=ended, nodes=nodes)
    for node, *moments in (("dgx-06", 3_700), ("dgx-07", 3_700, 4_300)):
        machine = Machine(node)
        for since in (began + moment for moment in moments):
            machine.post(machine.event("mount.slow", since, mount="/data", since=since))
            machine.post(machine.event("mount.well", since + 120, mount="/data", seconds=120))
    with CaptureQueriesContext(connection) as queries:
        answer = client.get(f"/jobs/{job.pk}")
    (warning,) = answer.context["warnings"]
    assert warning[0].timestamp() == pytest.approx(began + 4_300, abs=1)
    assert sum("mount.slow" in query["sql"] for query in queries) == 1
