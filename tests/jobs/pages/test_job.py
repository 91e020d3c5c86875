"""Test a job's page and its tabs: who sees it, and its content."""

import json
import re
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from jobs.models import Attempt, Checkpoint, Event
from portal.models import Project, User
from tests.jobs.pages.reading import save, text
from tests.lab import a_job, a_project, person

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(
    "tab", ["", "/life", "/logs", "/logs/lines", "/checkpoints", "/attempts", "/spec", "/spec.toml"]
)
def test_a_strangers_job_is_not_there(client: Client, tab: str) -> None:
    elsewhere = a_project("elsewhere")
    job = a_job(person("oskar", elsewhere), elsewhere)
    assert client.get(f"/jobs/{job.pk}{tab}").status_code == 404
    assert client.get(f"/jobs/999999{tab}").status_code == 404


@pytest.mark.parametrize("action", ["cancel", "resume", "edit", "delete"])
def test_a_strangers_job_cannot_be_touched(client: Client, action: str) -> None:
    elsewhere = a_project("elsewhere")
    job = a_job(person("oskar", elsewhere), elsewhere, state="running")
    assert client.post(f"/jobs/{job.pk}/{action}", {"name": "mine"}).status_code == 404
    assert client.get(f"/jobs/{job.pk}/{action}").status_code == 405
    job.refresh_from_db()
    assert job.name == "wren"
    assert Attempt.objects.get(job=job).cancel_asked_at is None


def test_a_running_job_shows_its_life(client: Client, mira: User, project: Project) -> None:
    now = timezone.now()
    lost = {"number": 1, "step": 80, "steps": 200, "submitted_at": now - timedelta(hours=3), "reason": "shapes differ"}
    job = a_job(mira, project, state="failed", name="nightjar", attempt=lost)
    stored = save(job, 60)
    latest = {"loss": 2.318, "validation_loss": 2.351, "tokens_per_second": 290_123.0, "step_seconds": 2.0}
    job.latest = Attempt.objects.create(
        job=job, number=2, state="running", step=150, steps=200, resume_from=stored, latest=latest,
        started_at=now - timedelta(minutes=30), last_report_at=now, pace_seconds=60, pace_steps=30, nodes=["dgx-01"],
    )  # fmt: skip
    job.save(update_fields=["latest"])
    html = text(client.get(f"/jobs/{job.pk}"))
    assert "resumed from step 60." in html
    assert "It should finish" in html
    for fact in ("150", "of 200", "2.318", "val 2.351", "290 k", "on dgx-01", "20"):
        assert fact in html
    assert "2 attempts since" in html, "the ribbon in words"
    assert "failed · 20 steps lost" in html
    Checkpoint.objects.update(state="pruned")
    assert "failed · 20 steps lost" in text(client.get(f"/jobs/{job.pk}")), "pruned later, it was saved all the same"
    assert 'data-state="running" data-alive="1"' in html
    assert 'id="figures" type="application/json"' in html
    assert "Cancel nightjar?" in html
    assert "The job is running: cancel it first" in html, "no resume while it runs"


def test_charts_know_where_attempts_and_restarts_begin(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, state="node_fail", attempt={"incarnation": 2, "step": 170})
    first = job.latest
    for incarnation, step in ((0, 0), (1, 80), (2, 120)):
        began = {"kind": "run.started", "time": timezone.now(), "data": {"start_step": step}}
        Event.objects.create(attempt=first, incarnation=incarnation, **began)

    def marks(path: str) -> object:
        return {key: value for key, value in marked(client, path).items() if key != "empty"}

    payload = {"at": 0, "label": "attempt 1", "state": None}
    assert marks(f"/jobs/{job.pk}") == {"breaks": [payload], "restarts": [80, 120]}
    again = {"number": 2, "state": "running", "resume_from": save(job, 100), "started_at": timezone.now()}
    job.latest = Attempt.objects.create(job=job, **again)
    job.save(update_fields=["latest"])
    two = {"at": 100, "label": "attempt 2", "state": "node_fail"}
    values = {"breaks": [payload, two], "restarts": [80]}
    assert marks(f"/jobs/{job.pk}/life?tab=overview") == values, "what attempt 2 did again begins nowhere"
    assert 'id="marked"' not in client.get(f"/jobs/{job.pk}/life?tab=logs").text


def test_charts_without_values_explain_what_to_expect_now(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, state="pending")
    assert marked(client, f"/jobs/{job.pk}")["empty"] == "No values yet: the job is in the queue."
    Attempt.objects.update(state="running", started_at=timezone.now())
    empty = marked(client, f"/jobs/{job.pk}/life?tab=overview")["empty"]
    assert empty == "No values yet. The trainer reports about every second once step 1 is done."
    Attempt.objects.update(state="failed", ended_at=timezone.now())
    assert (
        marked(client, f"/jobs/{job.pk}/life?tab=overview")["empty"] == "This job ended without reporting any values."
    )


def marked(client: Client, path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        client.get(path).text.split('id="marked" type="application/json">')[1].split("<")[0]
    )
    return found


def test_charts_of_a_program_of_somebody_s_mark_its_restarts_too(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, state="running", kind="script", attempt={"incarnation": 2})
    for incarnation, name in enumerate(["", "step-80", "step-120.g3", "?"]):
        payload = {"incarnation": incarnation, "resumed_from": name}
        Event.objects.create(attempt=job.latest, time=timezone.now(), kind="incarnation.started", rank=-1, data=payload)
    assert marked(client, f"/jobs/{job.pk}/life?tab=overview")["restarts"] == [80, 120]


def test_what_replicas_send_is_drawn_where_somebody_chose_how(client: Client, mira: User, project: Project) -> None:
    def drawn(**run: str) -> list[str]:
        job = a_job(mira, project, state="running", spec={"run": {"recipe": "language", **run}})
        page = client.get(f"/jobs/{job.pk}").text
        return [
            figure["id"] for figure in json.loads(page.split('id="figures" type="application/json">')[1].split("<")[0])
        ]

    assert "communicated_mib" in drawn(communication="diloco")
    assert "communicated_mib" not in drawn()


def test_a_job_that_lost_a_node_and_got_it_back(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, state="running")
    attempt = job.attempts.get()
    Attempt.objects.update(incarnation=4)
    for kind, report in (
        ("nodes.lost", {"incarnation": 0, "nodes": ["dgx02", "<b>"], "left": 1}),
        ("incarnation.ended", {"incarnation": 0, "rank": 1, "why": "node"}),
        ("incarnation.ended", {"incarnation": 1, "rank": None, "why": "joined"}),
        ("nodes.joined", {"incarnation": 2, "nodes": ["dgx02"], "world_size": 2}),
        ("incarnation.ended", {"incarnation": 2, "rank": 0}),
        ("incarnation.ended", {"incarnation": 3, "rank": 1, "failure": "hang", "why": "hang"}),
        ("nodes.joined", {"incarnation": [2], "nodes": 5}),
    ):
        Event.objects.create(attempt=attempt, time=timezone.now(), kind=kind, data=report)
    page = client.get(f"/jobs/{job.pk}/attempts").content.decode()
    for line in (
        "dgx02, &lt;b&gt; lost, restarted without",
        "restarted with dgx02",
        "rank 0 lost, restarted in place",
        "rank 1 hung, restarted in place",
    ):
        assert line in page


def test_an_elastic_job_shows_on_how_many_ranks_it_trains_now(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, state="running", attempt={"nodes": ["vm-0", "vm-1", "vm-2"]})
    job.spec = {**job.spec, "resources": {**job.spec["resources"], "nodes": "1:3", "ranks_per_node": 2}}
    job.save(update_fields=["spec"])
    page = text(client.get(f"/jobs/{job.pk}"))
    assert "<span>6</span> <small>on 3 nodes</small>" in page, "its launchers have not reported yet"
    for number, nodes in ((0, ["vm-0", "vm-1", "vm-2"]), (2, ["vm-0"]), (1, ["vm-0", "vm-2"])):
        payload = {"incarnation": number, "world_size": 2 * len(nodes), "nodes": nodes}
        Event.objects.create(attempt=job.latest, time=timezone.now(), kind="incarnation.started", data=payload)
    assert "<span>2</span> <small>on 1 of 3 nodes</small>" in text(client.get(f"/jobs/{job.pk}"))


def test_a_vision_job_draws_its_accuracy(client: Client, mira: User, project: Project) -> None:
    vision = a_job(mira, project, state="running", spec={"run": {"recipe": "vision"}})
    assert 'data-chart="accuracy"' in text(client.get(f"/jobs/{vision.pk}"))
    assert 'data-chart="accuracy"' not in text(client.get(f"/jobs/{a_job(mira, project, state='running').pk}"))


def test_a_researcher_sees_no_buttons_on_others_jobs(client: Client, project: Project) -> None:
    job = a_job(person("yuki", project), project, state="running")
    save(job, 10)
    html = text(client.get(f"/jobs/{job.pk}"))
    assert "Clone" in html
    for word in ("Cancel…", "Edit…", 'action="/jobs/'):
        assert word not in html


@pytest.mark.lengthy
def test_every_tab_answers_for_every_state(client: Client, mira: User, project: Project) -> None:
    for state in Attempt.State.values:
        job = a_job(mira, project, state=state, name=f"is-{state.replace('_', '-')}")
        for tab in ("", "/logs", "/checkpoints", "/attempts", "/spec", "/life"):
            response = client.get(f"/jobs/{job.pk}{tab}")
            assert response.status_code == 200, (state, tab)


def test_checkpoints_show_their_state_and_resume(client: Client, mira: User, project: Project) -> None:
    job = a_job(mira, project, state="timeout", attempt={"step": 130, "steps": 200}, directory="vision/a b")
    save(job, 100, bytes=81_400_000_000, seconds=38.2, consumed_samples=3200, parent_step=50)
    save(job, 120, state="corrupt", problem="digest differs")
    save(job, 50, state="pruned")
    html = text(client.get(f"/jobs/{job.pk}/checkpoints"))
    assert "81.4 GB" in html
    assert "38 s" in html
    assert "digest differs" in html
    assert "1 older one pruned" in html
    assert html.count("Resume<span") == 1, "nothing resumes from a damaged one"
    assert f"/vision/a b/job/checkpoints/step-100&#x27; job-{job.pk}-step-100.safetensors" in html
    assert f"/vision/a b/job/checkpoints/step-100&#x27; --hf job-{job.pk}-step-100<" in html


def test_the_model_is_taken_out_as_it_can_be(client: Client, mira: User, project: Project) -> None:
    def commands(run: dict[str, Any]) -> list[str]:
        job = a_job(mira, project, state="completed", directory="vision/a", spec={"run": run})
        save(job, 100)
        html = text(client.get(f"/jobs/{job.pk}/checkpoints"))
        return re.findall(r"step-100 ([^<]*)</code>", html.replace(f"job-{job.pk}-", ""))

    assert commands({"recipe": "vision"}) == ["step-100.safetensors"]
    assert commands({"language": {"lora_rank": 4}}) == ["--merged --hf step-100", "step-100-adapters"]


def test_attempts_show_what_vigil_did(client: Client, mira: User, project: Project) -> None:
    fields = {
        "decision": "Stopped: the same cause twice.", "exit_code": 1,
        "failure": {"rank": 5, "error": "RuntimeError: shapes", "kind": "exception"},
    }  # fmt: skip
    job = a_job(mira, project, state="failed", attempt=fields)
    html = text(client.get(f"/jobs/{job.pk}/attempts"))
    assert "Rank 5: RuntimeError: shapes" in html
    assert "Stopped: the same cause twice." in html


def test_a_spec_shows_what_differs_from_its_parent(client: Client, mira: User, project: Project) -> None:
    parent = a_job(mira, project, name="parent", spec_toml='name = "parent"\nsteps = 1\n')
    job = a_job(mira, project, name="child", parent=parent, spec_toml='name = "child"\nsteps = 1\n')
    html = text(client.get(f"/jobs/{job.pk}/spec"))
    assert "<del>name = &quot;parent&quot;</del><ins>name = &quot;child&quot;</ins>" in html
    assert "validate_every = 100" in text(client.get(f"/jobs/{job.pk}/spec?show=all")), "defaults filled in"
    job.spec["of_another_release"] = 1
    job.save(update_fields=["spec"])
    assert "As it was written" in text(client.get(f"/jobs/{job.pk}/spec?show=all")), "nobody knows its defaults"
    download = client.get(f"/jobs/{job.pk}/spec.toml")
    assert download.content == b'name = "child"\nsteps = 1\n'
    assert "attachment" in download.headers["Content-Disposition"]
