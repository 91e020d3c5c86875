"""Test the page of the queue and its endpoint: wording, filters, and which jobs a person sees."""

from __future__ import annotations

from typing import Any

import pytest
from django.utils import timezone

from jobs.models import Sweep
from jobs.spec import JobSpec
from nodes.cluster import sync
from portal.models import User
from tests.jobs.pages.cluster.reading import HOUR_S, node, queued
from tests.jobs.pages.reading import page_text
from tests.jobs.schedulers import ScriptedScheduler
from tests.lab import a_job, a_project, person, signed_in, sysadmin

pytestmark = pytest.mark.django_db


def test_the_queue_in_plain_words(mira: User, scheduler: ScriptedScheduler) -> None:
    html = page_text(mira, "/queue")
    assert "Your slurm-15 is pending, position 1 of 2 in gpu." in html
    assert "Resources: its resources are not free yet." in html
    assert "its owner would exceed the QOS’s limit per person." in html
    order = [
        html.index(name) for name in (">wren<", ">slurm-15<", ">slurm-14<", ">slurm-13<", ">slurm-16<", ">slurm-12<")
    ]
    assert order == sorted(order), "own first, then by priority, then what runs"
    assert ">held<" in html


@pytest.mark.parametrize(
    ("query", "there"),
    [
        ("state=pending", {"13", "14", "15", "16"}),
        ("mine=1", {"11", "15"}),
        ("user=oskar9", {"12"}),
        ("partition=cpu", {"14"}),
        ("q=slurm-13", {"13"}),
        ("q=%2316", {"16"}),
        ("q=oskar&state=pending", set()),
    ],
)
def test_the_queue_is_filtered_alike_on_page_and_api(
    mira: User, scheduler: ScriptedScheduler, query: str, there: set[str]
) -> None:
    items = signed_in(mira).get(f"/api/v1/queue?{query}").json()["items"]
    assert {item["scheduler_id"] for item in items} == there
    html = page_text(mira, f"/queue?{query}")
    assert {number for number in map(str, range(11, 17)) if f'"under">{number} ·' in html} == there


def test_the_queue_over_rest(mira: User, scheduler: ScriptedScheduler) -> None:
    client = signed_in(mira)
    first = client.get("/api/v1/queue?limit=4").json()
    rest = client.get(f"/api/v1/queue?limit=4&cursor={first['next']}").json()
    assert [item["scheduler_id"] for item in first["items"] + rest["items"]] == ["11", "15", "14", "13", "16", "12"]
    assert rest["next"] is None
    assert first["counts"] == {"pending": 4, "running": 2}
    users_job, waiting = first["items"][0], first["items"][3]
    assert (users_job["name"], users_job["user"], users_job["is_mine"]) == ("wren", "mira", True)
    assert users_job["job"] is not None
    assert users_job["gpu_indices"] == {"dgx-01": [0, 1, 2, 3]}
    assert (waiting["position"], waiting["waiting"], waiting["reason"]) == (2, 2, "Resources")
    assert waiting["why"] == "Resources: its resources are not free yet."
    assert client.get("/api/v1/queue?state=sleeping").status_code == 422
    assert client.get("/api/v1/queue?cursor=x").status_code == 422


def test_jobs_of_vigil_go_by_the_names_that_people_gave(mira: User, scheduler: ScriptedScheduler) -> None:
    sweep = Sweep.objects.create(name="rates", key="120f9dbab06497d9", owner=mira, project=a_project())
    theirs = a_job(person("finn"), a_project("siskin"), name="finch", state="running")
    assert theirs.latest is not None
    past = "model.0123456789abcdef"
    scheduler.queued += [
        queued(19, name=past, user="oskar9"),
        queued(17, name=f"rates.{sweep.key}", user="mira1", tasks=18, priority=99),
        queued(18, name=f"finch.{theirs.latest.key}", state="running", user="oskar9", nodes=("dgx-01",)),
    ]
    sync.read(scheduler)
    html = page_text(mira, "/queue")
    assert f'href="/sweeps/{sweep.pk}">rates</a>' in html
    assert "18 jobs of your rates are pending" in html
    assert ">finch<" in html
    assert f">{past}<" in html, "what came past Vigil is called as it is"
    assert "finch, oskar9" in html or "finch" in page_text(mira, "/nodes/dgx-01")
    items = {item["scheduler_id"]: item for item in signed_in(mira).get("/api/v1/queue").json()["items"]}
    assert (items["17"]["sweep"], items["17"]["name"], items["17"]["user"]) == (sweep.pk, "rates", "mira")
    item = signed_in(person("stranger")).get("/api/v1/queue?q=rates").json()["items"][0]
    assert (item["sweep"], item["name"], item["user"]) == (None, "rates", "mira1")


def test_an_array_counts_as_the_jobs_that_it_stands_for(mira: User, scheduler: ScriptedScheduler) -> None:
    """Alike on the pages, over REST and at home, which counts jobs of Vigil's."""
    sweep = Sweep.objects.create(name="rates", key="120f9dbab06497d9", owner=mira, project=a_project())
    for index in range(12):
        facts = {"scheduler_id": f"17_{index}", "reason": "Resources"}
        a_job(mira, sweep.project, name=f"rates-{index}", state="pending", sweep=sweep, attempt=facts)
    scheduler.queued = [
        queued(17, name=f"rates.{sweep.key}", user="mira1", tasks=12, priority=99),
        queued(18, priority=1),
    ]
    sync.read(scheduler)
    html = page_text(mira, "/queue")
    assert (
        "12 jobs of your rates are pending, from position 1 of 13 in gpu. "
        '<span class="muted">13 jobs pending and 0 running in total.' in html
    )
    assert 'Pending <span class="count">13</span>' in html
    assert "stands for 12 jobs" in html
    assert "8 GPUs each" in html
    assert "13 of 13" in html, "one who comes after twelve"
    assert ">2 of 2 rows</span>" in html
    assert "13 <small>jobs</small>" in page_text(mira, "/nodes")
    answer = signed_in(mira).get("/api/v1/queue").json()
    assert answer["counts"] == {"pending": 13}
    assert [(item["position"], item["waiting"]) for item in answer["items"]] == [(1, 13), (13, 13)]
    assert "1 job running, 12 pending." in page_text(mira, "/")


def test_a_job_that_never_starts_begins_with_that(mira: User, scheduler: ScriptedScheduler) -> None:
    spec = JobSpec.parse({"name": "heron", "resources": {"time_limit": "2-00:00:00", "partition": "gpu"}})
    facts = {"scheduler_id": "19", "reason": "PartitionTimeLimit"}
    job = a_job(mira, a_project(), name="heron", state="pending", spec=spec.model_dump(mode="json"), attempt=facts)
    scheduler.queued.append(queued(19, user="mira1", reason="PartitionTimeLimit", time_limit_s=48 * HOUR_S))
    sync.read(scheduler)
    for address in (f"/jobs/{job.pk}", f"/jobs/{job.pk}/life"):
        html = page_text(mira, address)
        assert '<p class="say">It can never start as requested.' in html
        assert "limits jobs to" in html[html.index("can never start") : html.index("What to do:")]


def test_where_everybody_sees_only_their_jobs(mira: User, scheduler: ScriptedScheduler, settings: Any) -> None:
    settings.VIGIL_QUEUE_VISIBLE = "own"
    items = signed_in(mira).get("/api/v1/queue").json()["items"]
    assert [item["scheduler_id"] for item in items] == ["11", "15"]
    html = page_text(mira, "/nodes")
    assert "GPU 4: in use" in html
    assert "oskar9" not in html
    assert "slurm-12" not in html
    assert "oskar9" not in page_text(mira, "/nodes/dgx-01")
    assert len(signed_in(sysadmin()).get("/api/v1/queue").json()["items"]) == 6
    anna = person("anna", a_project())
    assert [item["name"] for item in signed_in(anna).get("/api/v1/queue").json()["items"]] == ["wren"], (
        "a colleague of the project sees Vigil's jobs of it"
    )
    assert signed_in(person("stranger")).get("/api/v1/queue").json()["items"] == []


def test_a_colleague_sees_the_row_of_an_array_where_users_see_only_their_jobs(
    mira: User, scheduler: ScriptedScheduler, settings: Any
) -> None:
    """The attempts go by "17_0" and "17_1"; what still waits of them is the row 17."""
    settings.VIGIL_QUEUE_VISIBLE = "own"
    sweep = Sweep.objects.create(name="rates", key="120f9dbab06497d9", owner=mira, project=a_project())
    for task in (0, 1):
        facts = {"scheduler_id": f"17_{task}", "submitted_at": timezone.now()}
        a_job(mira, sweep.project, state="pending", name=f"rates-{task}", sweep=sweep, attempt=facts)
    scheduler.queued += [queued(17, name=f"rates.{sweep.key}", user="portal", tasks=2), queued(1, user="oskar9")]
    sync.read(scheduler)
    anna = person("anna", sweep.project)
    items = {item["scheduler_id"]: item for item in signed_in(anna).get("/api/v1/queue").json()["items"]}
    assert set(items) == {"11", "17"}
    assert (items["17"]["name"], items["17"]["sweep"], items["17"]["is_mine"]) == ("rates", sweep.pk, False)
    users_jobs = {item["scheduler_id"]: item for item in signed_in(mira).get("/api/v1/queue?mine=1").json()["items"]}
    assert users_jobs["17"]["is_mine"], "whoever's name Slurm has for it"
    assert signed_in(person("stranger")).get("/api/v1/queue").json()["items"] == []


def test_jobs_submitted_since_the_queue_was_read_are_listed(mira: User) -> None:
    sync.read(ScriptedScheduler(machines=[node("dgx-01")]))
    assert "The queue is empty." in page_text(mira, "/queue")
    a_job(mira, a_project(), state="pending", name="siskin")
    item = "1 job of yours has not been submitted to the scheduler yet."
    stranger = person("stranger")
    for address in ("/queue", "/nodes"):
        assert item in page_text(mira, address)
        assert item not in page_text(stranger, address)
    html = page_text(mira, "/queue")
    assert "The queue was empty at the last poll." in html
    assert "starts at once" not in html
    now = timezone.now()
    for task in (0, 1):
        facts = {"scheduler_id": f"17_{task}", "submitted_at": now}
        a_job(mira, a_project(), state="pending", name=f"rates-{task}", attempt=facts)
    handed = "2 jobs of yours were submitted since the queue was last read."
    assert f"{item} {handed}" in page_text(mira, "/queue")
    client = signed_in(mira)
    unseen = client.get("/api/v1/queue").json()["unseen"]
    assert unseen == {"unsubmitted": 1, "kept": 1, "newer": 2, "text": f"{item} {handed}"}
    sync.read(ScriptedScheduler(queued=[queued(17, user="mira1", tasks=2), queued(18, user="mira1", state="running")]))
    assert client.get("/api/v1/queue").json()["unseen"]["newer"] == 0
    assert f"2 jobs pending and 1 running in total. {item}" in page_text(mira, "/queue")
    fragment = page_text(mira, "/queue", **{"HX-Request": "true", "HX-Target": "live"})
    assert 'hx-swap-oob="true">all pending and running jobs of the cluster, polled' in fragment
