"""Test that a federated job counts rounds wherever others count steps, and does as others do or explains why not."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from jobs.errors import Conflict, SpecError
from jobs.models import Attempt, CadenceOrder, Job
from jobs.spec import JobSpec
from jobs.submitting import cadence, profiling
from jobs.submitting.dryrun import dry_run
from jobs.submitting.submit import resume, submit
from portal.models import Project, User
from tests.jobs.federation.federations import a_federation, spec_of
from tests.jobs.pages.reading import save, text
from tests.lab import bearer, on_disk
from vigil_cli import watch
from vigil_cli.tables import jobs as job_tables
from vigil_core import formatting, kinds

pytestmark = pytest.mark.django_db


def done(mira: User, project: Project, step: int = 30) -> Job:
    job = a_federation(mira, project, attempt={"step": step})
    save(job, step)
    return job


def test_its_first_attempt_has_as_many_steps_as_it_has_rounds(mira: User) -> None:
    job, _ = submit(mira, spec_of(rounds=12), spec_toml="# text")
    assert Attempt.objects.get(job=job).steps == 12
    assert kinds.by_name("of another release").length_of(job.spec) is None


def test_it_can_be_resumed_with_more_rounds(mira: User, project: Project) -> None:
    job = done(mira, project)
    with pytest.raises(Conflict, match="how many rounds to run"):
        resume(mira, job)
    with pytest.raises(Conflict, match="All 30 rounds"):
        resume(mira, job, step=30)
    with pytest.raises(SpecError, match="round 30"):
        resume(mira, job, steps=30)
    resume(mira, job, steps=45)
    job.refresh_from_db()
    assert job.spec["run"]["rounds"] == 45
    assert "rounds = 45" in job.spec_toml


def test_its_pages_speak_of_rounds(client: Client, mira: User, project: Project) -> None:
    now = timezone.now()
    job = a_federation(mira, project, state="running", attempt={"step": 12, "last_report_at": now})
    html = text(client.get(f"/jobs/{job.pk}"))
    assert "Round 13 of 30, training since" in html
    assert "now<tspan" in html
    assert "· round 12" in html
    assert "step 12" not in html
    save(job, 10)
    result = text(client.get(f"/jobs/{job.pk}/checkpoints"))
    assert ">Round</th>" in result
    assert "Checkpoint at round 10" in result
    listed = text(client.get("/jobs?kind=federated"))
    assert f'id="job-{job.pk}"' in listed
    assert '<option value="federated" selected>' in listed


def test_lost_rounds_are_reported(client: Client, mira: User, project: Project) -> None:
    job = a_federation(mira, project, state="failed", attempt={"step": 12, "reason": "it broke"})
    save(job, 10)
    html = text(client.get(f"/jobs/{job.pk}"))
    assert "Failed at round 12." in html
    assert "It can be resumed from round 10, 2 rounds back." in html
    assert "failed · 2 rounds lost" in html
    assert 'for="resume-steps">Up to round</label>' in html


def test_it_is_not_profiled_and_explains_why(mira: User, project: Project) -> None:
    job = a_federation(mira, project, state="running")
    with pytest.raises(Conflict, match="counts rounds"):
        profiling.request_profile(mira, job)
    answer = bearer(mira).post(f"/api/v1/jobs/{job.pk}/profile", {}, content_type="application/json")
    assert answer.status_code == 409


def test_it_saves_as_often_as_somebody_requests(mira: User, project: Project) -> None:
    job = a_federation(mira, project, state="running")
    with pytest.raises(SpecError, match="0 rounds is out of range"):
        cadence.set_cadence(mira, job, 0)
    cadence.set_cadence(mira, job, 5)
    assert CadenceOrder.objects.get(job=job).every == 5


def test_its_weights_can_be_taken_out(client: Client, mira: User, project: Project) -> None:
    job = done(mira, project)
    on_disk(job)
    html = text(client.get(f"/jobs/{job.pk}/checkpoints"))
    assert f"job-{job.pk}-round-30.safetensors" in html
    assert "--hf" not in html


def test_a_dry_run_shows_how_its_data_would_be_split(mira: User) -> None:
    found = {finding.title: finding for finding in dry_run(mira, spec_of())}
    holds = found["Specification"].text.replace(formatting.NBSP, " ")
    assert holds.startswith("Valid: 30 rounds of fedavg on tabular, 10 clients")
    assert "10\N{NO-BREAK SPACE}clients:" in found["Split"].text
    assert "median" in found["Split"].text
    many = JobSpec.parse({"name": "x", "kind": "federated", "run": {"clients": 700, "batch": 2}})
    found = {finding.title: finding for finding in dry_run(mira, many)}
    assert "no validation samples, and no accuracy of their own" in found["Split"].text


def test_the_command_line_counts_rounds() -> None:
    result: dict[str, Any] = {
        "id": 7, "name": "heron", "kind": "federated", "state": "running", "reason": "", "latest": {"accuracy": 0.875},
        "progress": {"step": 12, "steps": 30, "fraction": 0.4, "eta_seconds": None},
    }  # fmt: skip
    assert watch.progress_text(result) == "running · 12 / 30 rounds · accuracy 0.875"
    attempt = {"number": 1, "nodes": [], "decision": ""}
    rest = {"project": "p", "owner": "o", "tags": [], "notes": "", "parent": None, "directory": "", "url": "u"}
    times = {"created_at": "2026-01-31T12:00:00Z", "started_at": None, "ended_at": None}
    assert any(
        "rounds" in line and "12/30" in line for line in job_tables.job({**result, **rest, **times, "attempt": attempt})
    )


FEDERATION = {"recipe": "tabular", "rounds": 3, "clients": 4, "split": "dirichlet", "dirichlet": {"alpha": 0.3}}


@pytest.mark.parametrize("kind", [{"kind": "federate"}, {}])
def test_a_kind_that_is_wrong_or_missing_is_a_single_problem(kind):
    with pytest.raises(SpecError) as caught:
        JobSpec.parse({"name": "heron", **kind, "run": FEDERATION, "resources": {"nodes": 0}})
    of_kind, other = sorted(caught.value.problems, key=lambda problem: problem.field)
    assert (of_kind.field, other.field) == ("kind", "resources.nodes")
    assert "Did you mean" in of_kind.message
    assert '"federated"?' in of_kind.message
