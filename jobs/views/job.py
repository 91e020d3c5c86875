"""A job's page: its head, and the tabs that only need database rows."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field, replace
from difflib import unified_diff
from itertools import pairwise
from typing import Any

from django.conf import settings
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_safe

from jobs.disk import missing
from jobs.disk.provenance import history
from jobs.errors import SpecError
from jobs.gathering import charts as curves
from jobs.gathering import gpu_tab, guard_events, hardware_events, layouts, slow_mounts, verdicts
from jobs.gathering import job_life as lives
from jobs.gathering.job_life import JobLife
from jobs.models import Attempt, Checkpoint, Incident, Job
from jobs.presenting.job_page import attached, charts, environments, sentence, slurm_steps
from jobs.presenting.job_page.guard_events import GuardEvent
from jobs.presenting.job_page.layouts import ChosenLayout
from jobs.spec import JobSpec, write_toml
from jobs.submitting import clone, release
from jobs.views import cadence, performance, rounds
from jobs.waiting import maintenance, pending
from jobs.waiting.reasons import waiting_reason_of
from portal.access import can, user_of
from portal.http.download import as_download

OVERVIEW_CHECKPOINTS = 6
SHOWN_SLOW = 3  # slow periods of a mount described in words
MAX_ENVIRONMENTS = 25  # attempts whose environments are read from disk for one page


@dataclass
class JobPage:
    """The data that every tab of a job's page needs."""

    job: Job
    life: JobLife
    may_change: bool
    may_kill: bool

    def context(self, tab: str, **more: object) -> dict[str, object]:
        counts = {
            "checkpoints": len(self.life.checkpoints),
            "attempts": len(self.life.attempts),
            "clients": (self.job.spec.get("run") or {}).get("clients"),
        }
        return {
            "section": "jobs",
            "job": self.job,
            "life": self.life,
            "headline": self.life.sentence,
            "attempt": self.life.latest,
            "may_change": self.may_change,
            "may_kill": self.may_kill,
            "tab": tab,
            "counts": counts,
            "outside": attached.facts(self.job.spec) if self.job.is_attached else [],
            "has_gpus": lambda: gpu_tab.has_any(self.life),
            **more,
        }


def page_of(request: HttpRequest, job_id: int) -> JobPage:
    """Load a job that this person may see; other people's jobs give 404."""
    user = user_of(request)
    jobs = Job.objects.visible_to(user).with_latest_attempt().select_related("parent")
    job = get_object_or_404(jobs, pk=job_id)
    life = lives.load(job)
    # Otherwise a cancel does the same: it ends waiting jobs, and jobs started with sbatch, without asking them to save.
    may_kill = life.saves_before_it_ends and can(user, "kill", job)
    return JobPage(job, life, can(user, "change", job), may_kill)


@login_required
@require_safe
def overview(request: HttpRequest, job_id: int) -> HttpResponse:
    """Show the first tab; for a federated job its rounds."""
    page = page_of(request, job_id)
    charted = {
        "figures": charts.figures(
            page.job.job_kind, page.job.spec, curves.names(page.life), is_alive=page.life.latest.is_alive
        ),
        "series": curves.first_paint(page.job, page.life),
    }
    context = page.context("overview", **charted, **_overview(request, page))
    return render(request, "jobs/rounds.html" if page.job.kind == "federated" else "jobs/overview.html", context)


@login_required
@require_safe
def life(request: HttpRequest, job_id: int) -> HttpResponse:
    """Render the page's head again: htmx requests it while the job is alive, and once when its state changes."""
    page = page_of(request, job_id)
    tab = request.GET.get("tab", "overview")
    more = _overview(request, page) if tab == "overview" else {}
    return render(request, "jobs/_life.html", page.context(tab, **more))


def _overview(request: HttpRequest, page: JobPage) -> dict[str, Any]:
    """Return the parts of the overview that change while the job is alive, except its charts."""
    newest, has_more = guard_events.newest(page.life.latest)
    slow = slow_mounts.find(page.life)
    newest += [(mount.at, mount.text) for mount in slow if mount.attempt == page.life.latest][-SHOWN_SLOW:]
    newest += hardware_events.recent_events(page.life.latest, page.life.now)
    return {
        "marks": {
            **curves.marks(page.life),
            **({"slow": slow_mounts.by_step(page.life, slow)} if slow else {}),
            "empty": charts.empty_text(
                page.job.job_kind, state=page.life.latest.state, is_alive=page.life.latest.is_alive
            ),
        },
        "newest": page.life.checkpoints[:OVERVIEW_CHECKPOINTS],
        "shown": performance.performance_panel(page.life, may_change=page.may_change),
        "finding": gpu_tab.low_use(page.life),
        "died": verdicts.newest_verdict(page.life.latest),
        "died_before": verdicts.previous_verdict(page.life.attempts),
        "warnings": sorted(newest, reverse=True),
        "has_more_warnings": has_more,
        **(rounds.rounds_context(request, page.life, page.life.sentence) if page.job.kind == "federated" else {}),
        **_waits(request, page),
    }


def _waits(request: HttpRequest, page: JobPage) -> dict[str, Any]:
    """Return why a pending job waits, with a different lead sentence if it can never start."""
    if page.life.latest.state != Attempt.State.PENDING or page.life.cancelling:
        return {}
    if gone := missing.problem(page.life.latest):
        what, _, remedy = gone.partition(". ")
        return {"headline": sentence.Sentence("It cannot start.", f"{what}.", remedy)}
    answer = pending.why(user_of(request), page.job, page.life.latest, now=page.life.now)
    if not answer.why:
        return {}
    waits: dict[str, Any] = {"waits": answer, "is_held": release.is_held(page.life.latest)}
    if answer.why.never:
        return waits | {"headline": sentence.never_starts(answer.why.sentence)}
    if answer.why.blocks and answer.why.blocks[0].kind == "maintenance":  # the scheduler's reason names only a drain
        text = maintenance.summary(answer.why.maintenance[0], page.life.now.timestamp())
        return waits | {"headline": replace(page.life.sentence, rest=text)}
    return waits


@login_required
@require_safe
def checkpoints(request: HttpRequest, job_id: int) -> HttpResponse:
    page = page_of(request, job_id)
    pruned = page.job.checkpoints.filter(state=Checkpoint.State.PRUNED).count()
    stored_bytes = sum(checkpoint.bytes for checkpoint in page.life.checkpoints)
    exports, saves = _exports(page.job, page.life.resumable), cadence.saves_section(page.life)
    context = page.context("checkpoints", pruned=pruned, stored_bytes=stored_bytes, exports=exports, saves=saves)
    return render(request, "jobs/checkpoints.html", context)


@dataclass(frozen=True)
class Export:
    """A command that exports the newest checkpoint's weights, and what it produces."""

    id: str
    makes: str
    command: str


def _exports(job: Job, checkpoint: Checkpoint | None) -> list[Export]:
    """Return export commands; empty without a checkpoint of Vigil's trainer."""
    if checkpoint is None or not job.job_kind.exports or not job.directory:
        return []
    folder = settings.VIGIL_RUNS / job.directory / "job" / "checkpoints" / checkpoint.name
    run = job.spec.get("run") or {}
    has_adapters = bool(run.get("language", {}).get("lora_rank"))
    name = f"job-{job.pk}-{job.job_kind.unit}-{checkpoint.step}"

    def line(key: str, makes: str, *more: str) -> Export:
        return Export(key, makes, shlex.join(["python", "-m", "training", "export", str(folder), *more]))

    if has_adapters:
        merged = line("export-hf", "The whole model with merged adapters, for transformers", "--merged", "--hf", name)
        return [merged, line("export", "The adapters only, for peft", f"{name}-adapters")]
    plain = line("export", "The weights with Vigil’s names, as one safetensors file", f"{name}.safetensors")
    if job.kind == "federated" or run.get("recipe", "language") != "language":
        return [plain]
    return [line("export-hf", "A model directory with tokenizer, for transformers", "--hf", name), plain]


@login_required
@require_safe
def attempts(request: HttpRequest, job_id: int) -> HttpResponse:
    page = page_of(request, job_id)
    ran = environments.attempt_environments(history(page.life.attempts, most=MAX_ENVIRONMENTS))
    guarded, chosen = guard_events.by_attempt(page.life.attempts), layouts.chosen_layouts(page.life.attempts)
    in_place = verdicts.incidents_in_place(page.life.attempts)
    before = {
        attempt.pk: earlier.steps
        for earlier, attempt in pairwise(page.life.attempts)
        if earlier.steps and attempt.steps and earlier.steps != attempt.steps
    }
    rows = [
        replace(
            _attempt_row(
                attempt, page.life, ran.get(attempt.number), guarded.get(attempt.pk, []), chosen.get(attempt.pk)
            ),
            in_place=[(incident, verdicts.summary(incident)) for incident in in_place.get(attempt.pk, [])],
            steps_before=before.get(attempt.pk),
        )
        for attempt in reversed(page.life.attempts)
    ]
    unread = len(rows) > MAX_ENVIRONMENTS
    return render(request, "jobs/attempts.html", page.context("attempts", rows=rows, unread=unread))


@dataclass
class AttemptRow:
    """An attempt as its list shows it."""

    attempt: Attempt
    reason: str
    ran_s: float | None
    warnings: list[GuardEvent]
    layout: ChosenLayout | None
    environment: environments.AttemptEnvironment | None
    steps: slurm_steps.SlurmSteps | None
    postmortem: str  # its address
    in_place: list[tuple[Incident, str]] = field(default_factory=list)  # after which its ranks were started again
    steps_before: int | None = None  # number for the previous attempt, if different


def _attempt_row(
    attempt: Attempt,
    life: JobLife,
    environment: environments.AttemptEnvironment | None,
    guarded: list[GuardEvent],
    layout: ChosenLayout | None,
) -> AttemptRow:
    end = attempt.ended_at or life.now
    ran = (end - attempt.started_at).total_seconds() if attempt.started_at else None
    warnings = sorted([*life.restarts.get(attempt.pk, []), *guarded], key=lambda warning: warning[0])
    steps, postmortem = (
        slurm_steps.describe_steps(attempt.slurm_steps, is_attached=attempt.job.is_attached),
        life.postmortem_of(attempt),
    )
    reason = waiting_reason_of(attempt, life.job.spec, life.now)
    return AttemptRow(attempt, reason, ran, warnings, layout, environment, steps, postmortem)


@login_required
@require_safe
def spec(request: HttpRequest, job_id: int) -> HttpResponse:
    page = page_of(request, job_id)
    user = user_of(request)
    parent = page.job.parent
    if parent is not None and not can(user, "see", parent):
        parent = None
    show = request.GET.get("show")
    text = page.job.spec_toml
    if show == "all":
        try:
            text = write_toml(JobSpec.parse(page.job.spec), defaults=True)
        except SpecError:  # started with sbatch, or by another release
            show = None
    context = page.context(
        "spec",
        parent=parent,
        diff=_diff(parent, page.job) if parent else [],
        text=text.splitlines(),
        show=show,
        lengthened=len({attempt.steps for attempt in page.life.attempts if attempt.steps}) > 1,
        source=clone.source_of(page.job),
    )
    return render(request, "jobs/spec.html", context)


def _diff(parent: Job, job: Job) -> list[tuple[str, str]]:
    """Return the lines of both texts: ("same" | "del" | "ins" | "gap", line)."""
    marks = {" ": "same", "-": "del", "+": "ins", "@": "gap"}
    lines = unified_diff(parent.spec_toml.splitlines(), job.spec_toml.splitlines(), lineterm="", n=3)
    return [(marks[line[0]], line[1:]) for line in list(lines)[2:] if line[:1] in marks]


@login_required
@require_safe
def spec_toml(request: HttpRequest, job_id: int) -> HttpResponse:
    """Download the spec as it was written."""
    job = get_object_or_404(Job.objects.visible_to(user_of(request)), pk=job_id)
    response = HttpResponse(job.spec_toml, content_type="application/toml; charset=utf-8")
    return as_download(response, f"job-{job.pk}.toml")
