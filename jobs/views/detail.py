"""A job's page: its head and the tabs that need no more than rows."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from difflib import unified_diff
from typing import Any, cast

from django.conf import settings
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_safe

from jobs.models import Attempt, Checkpoint, Job
from jobs.spec import JobSpec, write_toml
from jobs.submitting import again
from jobs.views import charts, environments, incidents, layouts, measured, outside, sentence, steps
from jobs.views import life as lives
from jobs.why import pending
from jobs.why.reasons import reason_of
from portal.access import can
from portal.models import User

OVERVIEW_CHECKPOINTS = 6


@dataclass
class Page:
    """What every tab of a job's page needs."""

    job: Job
    life: lives.Life
    may_change: bool

    def context(self, tab: str, **more: object) -> dict[str, object]:
        counts = {"checkpoints": len(self.life.checkpoints), "attempts": len(self.life.attempts)}
        return {
            "section": "jobs",
            "job": self.job,
            "life": self.life,
            "said": self.life.sentence,
            "attempt": self.life.latest,
            "may_change": self.may_change,
            "tab": tab,
            "counts": counts,
            "outside": outside.facts(self.job),
            **more,
        }


def page_of(request: HttpRequest, job_id: int) -> Page:
    """The job that this person may see, or 404: a stranger's job does not exist."""
    user = cast(User, request.user)
    jobs = Job.objects.visible_to(user).with_latest_attempt().select_related("parent").prefetch_related("tags")
    job = get_object_or_404(jobs, pk=job_id)
    return Page(job, lives.tell(job), can(user, "change", job))


@login_required
@require_safe
def overview(request: HttpRequest, job_id: int) -> HttpResponse:
    page = page_of(request, job_id)
    charted = {"figures": charts.figures(page.job, page.life), "series": charts.first_paint(page.job, page.life)}
    context = page.context("overview", **charted, **_overview(request, page))
    return render(request, "jobs/overview.html", context)


@login_required
@require_safe
def life(request: HttpRequest, job_id: int) -> HttpResponse:
    """The page's head anew: what htmx swaps in while the job lives, and once when its state changes."""
    page = page_of(request, job_id)
    tab = request.GET.get("tab", "overview")
    more = _overview(request, page) if tab == "overview" else {}
    return render(request, "jobs/_life.html", page.context(tab, **more))


def _overview(request: HttpRequest, page: Page) -> dict[str, Any]:
    """What of the overview changes while the job lives, beside its charts."""
    newest, has_more = incidents.newest(page.life.latest)
    return {
        "marks": charts.marks(page.life),
        "newest": page.life.checkpoints[:OVERVIEW_CHECKPOINTS],
        "shown": measured.tell(page.life, may_change=page.may_change),
        "incidents": newest,
        "has_more_incidents": has_more,
        **_waits(request, page),
    }


def _waits(request: HttpRequest, page: Page) -> dict[str, Any]:
    """Why it waits, while it does and nobody has cancelled it; the sentence is of that where waiting is in vain."""
    if page.life.latest.state != Attempt.State.PENDING or page.life.cancelling:
        return {}
    told = pending.why(cast(User, request.user), page.job, page.life.latest, now=page.life.now)
    if not told.why:
        return {}
    return {"waits": told} | ({"said": sentence.never(told.why.sentence)} if told.why.never else {})


@login_required
@require_safe
def checkpoints(request: HttpRequest, job_id: int) -> HttpResponse:
    page = page_of(request, job_id)
    pruned = page.job.checkpoints.filter(state=Checkpoint.State.PRUNED).count()
    held = sum(checkpoint.bytes for checkpoint in page.life.checkpoints)
    context = page.context("checkpoints", pruned=pruned, held=held, export=_export(page.job, page.life.resumable))
    return render(request, "jobs/checkpoints.html", context)


def _export(job: Job, checkpoint: Checkpoint | None) -> str:
    """The command that takes the newest checkpoint's weights out; "" where there is none, or not of our trainer."""
    if checkpoint is None or job.kind != "distributed" or not job.directory:
        return ""
    folder = settings.VIGIL_RUNS / job.directory / "job" / "checkpoints" / checkpoint.name
    has_adapters = bool((job.spec.get("run") or {}).get("language", {}).get("lora_rank"))
    target = f"job-{job.pk}-step-{checkpoint.step}" + ("" if has_adapters else ".safetensors")
    return shlex.join(["python", "-m", "training", "export", str(folder), target])


@login_required
@require_safe
def attempts(request: HttpRequest, job_id: int) -> HttpResponse:
    page = page_of(request, job_id)
    ran = environments.shown(page.life)
    guarded, chosen = incidents.of(page.life.attempts), layouts.chosen(page.life.attempts)
    told = [
        _told(attempt, page.life, ran.get(attempt.number), guarded.get(attempt.pk, []), chosen.get(attempt.pk))
        for attempt in reversed(page.life.attempts)
    ]
    unread = len(told) > environments.MOST_READ
    return render(request, "jobs/attempts.html", page.context("attempts", told=told, unread=unread))


@dataclass
class Told:
    """An attempt with what its row says."""

    attempt: Attempt
    reason: str
    ran_s: float | None
    incidents: list[incidents.Incident]
    layout: layouts.Layout | None
    environment: environments.Shown | None
    steps: steps.Shown | None


def _told(
    attempt: Attempt,
    life: lives.Life,
    environment: environments.Shown | None,
    guarded: list[incidents.Incident],
    layout: layouts.Layout | None,
) -> Told:
    end = attempt.ended_at or life.now
    ran = (end - attempt.started_at).total_seconds() if attempt.started_at else None
    happened = sorted([*life.restarts.get(attempt.pk, []), *guarded], key=lambda incident: incident[0])
    return Told(attempt, reason_of(attempt), ran, happened, layout, environment, steps.shown(attempt))


@login_required
@require_safe
def spec(request: HttpRequest, job_id: int) -> HttpResponse:
    page = page_of(request, job_id)
    user = cast(User, request.user)
    parent = page.job.parent
    if parent is not None and not can(user, "see", parent):
        parent = None
    show = request.GET.get("show")
    is_whole = show == "all" and not page.job.is_attached
    text = write_toml(JobSpec.model_validate(page.job.spec), defaults=True) if is_whole else page.job.spec_toml
    context = page.context(
        "spec",
        parent=parent,
        diff=_diff(parent, page.job) if parent else [],
        text=text.splitlines(),
        show=show,
        source=again.source_of(page.job),
    )
    return render(request, "jobs/spec.html", context)


def _diff(parent: Job, job: Job) -> list[tuple[str, str]]:
    """Lines of the two texts: ("same" | "del" | "ins" | "gap", line)."""
    marks = {" ": "same", "-": "del", "+": "ins", "@": "gap"}
    lines = unified_diff(parent.spec_toml.splitlines(), job.spec_toml.splitlines(), lineterm="", n=3)
    return [(marks[line[0]], line[1:]) for line in list(lines)[2:] if line[:1] in marks]


@login_required
@require_safe
def spec_toml(request: HttpRequest, job_id: int) -> HttpResponse:
    """The spec as it was written, to keep."""
    job = get_object_or_404(Job.objects.visible_to(cast(User, request.user)), pk=job_id)
    response = HttpResponse(job.spec_toml, content_type="application/toml; charset=utf-8")
    response.headers["Content-Disposition"] = f'attachment; filename="job-{job.pk}.toml"'
    return response
