"""Test that every text about a job's steps has the same wording for a federated job's rounds."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from django.utils import timezone

from diagnosis.signatures.catalogue import SHIPPED
from jobs.models import Attempt, Job
from jobs.postmortem import incident_notices
from jobs.presenting.job_page import cadence, guard_events, sentence
from jobs.presenting.postmortems import headline, lanes, rank_steps, restart_drawing
from jobs.presenting.postmortems.cost import Cost, NextAttempt
from jobs.spec import JobSpec
from portal.models import Project, User
from tests.jobs.federation.federations import a_federation
from tests.jobs.pages.reading import text
from tests.jobs.presenting.postmortems.test_lanes import FACTS
from tests.lab import a_checkpoint, a_job, signed_in
from training.config.progress_unit import progress_unit
from training.launch.watchdog import Hang
from vigil_cli import diagnose
from vigil_cli.tables import jobs as job_tables
from vigil_core import kinds

NOW = datetime(2026, 11, 21, tzinfo=UTC)
COST = Cost(
    steps=9, lost_seconds=60.0, gpu_hours=None, money=None, currency="", detect_seconds=None, resume_seconds=None,
    catch_up_seconds=None, is_awaited=False,
)  # fmt: skip
FIGURES: dict[str, Any] = {
    "detect_seconds": None, "resume_seconds": None, "catch_up_seconds": None, "gpu_hours": None,
    "steps_lost": 9, "kept_step": 20,
}  # fmt: skip
CADENCE: Any = SimpleNamespace(
    best_efficiency=0.9,
    present_s=60.0,
    efficiency=0.8,
    cost_s=1.0,
    mtbf_s=3600.0,
    source="seen",
    best_s=90.0,
    best_every=12,
)
ITEM = {
    "step": 20, "name": "c", "state": "verified", "pinned": False, "problem": "", "bytes": 1, "seconds": 1.0,
    "attempt": 1, "parent_step": None, "created_at": "2026-01-31T12:00:00Z",
}  # fmt: skip
CURVE = {"name": "loss", "step": [1], "last_step": 9, "count": 9}


def _across(kind: kinds.JobKind) -> str:
    steps, values = np.arange(10), np.linspace(2.0, 1.0, 10)
    curve = restart_drawing.RestartCurveInput(
        name="loss", before=(steps, values), after=(steps[5:], values[5:]), attempt_numbers=(1, 2), resumed_step=5,
        end_step=9, is_exact=True, unit=kind.unit,
    )  # fmt: skip
    drawn = restart_drawing.draw(curve)
    assert drawn is not None
    return drawn.words


def _ranks(kind: kinds.JobKind) -> str:
    report = rank_steps.compare_ranks({0: 12, 1: 12, 2: 11}, {}, 2, kind.unit)
    assert report is not None
    return " ".join([report.words, *(cell.title for group in report.groups for cell in group.cells)])


def _again(kind: kinds.JobKind) -> str:
    again = NextAttempt(number=2, state="running", queued_at=NOW, started_at=NOW, from_step=20)
    cause: Any = SimpleNamespace(owner="researcher")
    return headline.headline(
        verdict_text="It died.", cause=cause, advice="", decision="", again=again, cost=COST, unit=kind.unit
    ).rest


def _died(kind: kinds.JobKind) -> str:
    verdict = {"says": "It died.", "cause": "program.exception", "confidence": 0.9, "owner": "researcher",
               "evidence": [], "runner_up": None, "ruled_out": [], "not_seen": [], "advice": "", "overruled": None,
               "figures": FIGURES, "follows": "", "url": "", "frame": "", "exception": "", "node": "",
               "rank": None}  # fmt: skip
    return "\n".join(diagnose._postmortem_lines(verdict, kind.units))


def _helps(kind: kinds.JobKind) -> str:
    """Return the descriptions of the fields of [run] that set how often something is done."""
    model = "FederationConfig" if kind.name == "federated" else "RunConfig"
    fields = JobSpec.model_json_schema()["$defs"][model]["properties"]
    return " ".join(fields[name]["description"] for name in ("validate_every", "checkpoint_every", "keep_every"))


def _saves(kind: kinds.JobKind) -> str:
    data = {"step": 20, "reason": "no space"}
    names = (guard_events.NOT_SAVED, "checkpoint.damaged")
    return " ".join(guard_events.describe_event(name, data, kind.unit) for name in names)


def _sentence(kind: kinds.JobKind) -> str:
    facts = sentence.SentenceFacts(state="failed", now=NOW, number=1, step=25, newest_checkpoint=20, unit=kind.unit)
    report = sentence.describe_job(facts)
    return f"{report.lead} {report.rest} {report.move}"


TEXTS: dict[str, Callable[[kinds.JobKind], str]] = {
    "the form": _helps,
    "the head of its page": _sentence,
    "events of its saves": _saves,
    "how often it saves": lambda kind: " ".join(words for _, words in cadence.facts(CADENCE, kind.unit)),
    "last words of ranks": _ranks,
    "curves across a restart": _across,
    "what a post-mortem says of the next attempt": _again,
    "its drawing": lambda kind: lanes.draw(replace(FACTS, unit=kind.unit)).words,
    "vigil diagnose": _died,
    "vigil checkpoints": lambda kind: job_tables.checkpoints({"items": [ITEM]}, kind.unit)[0],
    "vigil metrics": lambda kind: job_tables.metrics([CURVE], {}, units=kind.units, superseded=False)[0],
    "a hang": lambda kind: str(Hang([3], 16, "data", 812, 61.0, kind.unit)),
}
"""The text about a job of this kind, by its place."""


@pytest.mark.parametrize("where", TEXTS)
def test_rounds_are_shown_as_steps_are(where: str) -> None:
    steps, rounds = (TEXTS[where](kinds.by_name(name)) for name in ("distributed", "federated"))
    assert re.search(r"(?i)\bsteps?\b", steps)
    assert rounds == steps.replace("step", "round").replace("Step", "Round").replace("STEP", "ROUND")


def test_trainer_and_portal_count_the_same() -> None:
    assert {kind.name: kind.unit for kind in kinds.ALL} == {kind.name: progress_unit(kind.name) for kind in kinds.ALL}


@pytest.mark.parametrize("name", ["vigil.hang_rank", "vigil.hang_all", "vigil.passed_over", "vigil.completed"])
def test_a_post_mortem_reads_the_messages_of_either(name: str) -> None:
    path = SHIPPED / "vigil.toml"
    (entry,) = (entry for entry in tomllib.loads(path.read_text())["entry"] if entry["name"] == name)
    line = "step 812  not saved: no space" if name == "vigil.passed_over" else entry["example"]
    for message in (line, re.sub(r"\bstep (?=\d)", "round ", line)):
        assert re.search(entry["pattern"], message), message


@pytest.mark.django_db
def test_home_shows_where_each_ended(mira: User, project: Project) -> None:
    def news(job: Job) -> str:
        Attempt.objects.filter(job=job).update(ended_at=timezone.now())
        return text(signed_in(mira).get("/")).replace("\N{NO-BREAK SPACE}", " ")

    attempt = {"state": "cancelled", "step": 25}
    assert "was cancelled at step 25" in news(a_job(mira, project, attempt=attempt))
    assert "was cancelled at round 25" in news(a_federation(mira, project, attempt=attempt))


@pytest.mark.django_db
def test_how_far_a_resume_goes_is_shown(mira: User, project: Project) -> None:
    job = a_federation(mira, project, attempt={"state": "completed", "step": 30, "steps": 30})
    first = job.attempts.get()
    again = Attempt.objects.create(job=job, number=2, state="running", steps=60)
    Job.objects.filter(pk=job.pk).update(latest=again)
    assert first.steps == 30
    page = signed_in(mira)
    assert "rounds 30 → 60" in text(page.get(f"/jobs/{job.pk}/attempts"))
    assert "As it was written, with the rounds of a resume" in text(page.get(f"/jobs/{job.pk}/spec"))


@pytest.mark.django_db
def test_notices_of_a_death_name_what_is_lost(mira: User, project: Project) -> None:
    def lost(job: Job) -> str:
        a_checkpoint(job, 20)
        incident: Any = SimpleNamespace(attempt=job.latest)
        return incident_notices._lost_work(incident).replace("\N{NO-BREAK SPACE}", " ")

    attempt = {"step": 25}
    assert lost(a_job(mira, project, attempt=attempt)) == "5 steps since the checkpoint at step 20"
    assert lost(a_federation(mira, project, attempt=attempt)) == "5 rounds since the checkpoint at round 20"
