"""Show how well a job runs: where a step's time goes, its bottleneck, goodput and profiles.

All of it except the goodput was reported by the trainer in events. Any program may report such events, so each value is
validated and invalid ones are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse, StreamingHttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.views.decorators.http import require_POST, require_safe

from jobs.disk import profiles as files
from jobs.errors import JobError, ProfileError
from jobs.gathering.job_life import JobLife
from jobs.goodput import Goodput, goodput
from jobs.models import Attempt, Event, Job
from jobs.profiles import Profile, profiles
from jobs.submitting import profiling
from portal.access import user_of
from portal.http.api import stream
from portal.http.download import as_download
from training.metrics.bottleneck import BOUNDS, MIN_STEPS, SPLIT
from vigil_core import formatting, untrusted
from vigil_core.untrusted import whole

BOTTLENECK = "run.verdict"
SHOWN_PROFILES = 5
MAX_CHARACTERS = 400  # of a sentence

LABEL, LETTER = 0.035, 0.0175
"""Shares of the bar's width on a phone: the margin around a part's name, and each of its letters."""

# Each part's name and colour in the bar; loss, throughput and others keep their colours in the charts.
_PARTS = {
    "forward": ("Forward", 1),
    "backward": ("Backward", 3),
    "forward_backward": ("Forward and backward", 1),
    "optimizer": ("Optimizer", 6),
    "communication": ("Communication", 2),
    "data": ("Waiting for data", 4),
    "checkpoint": ("Checkpoints", 5),
    "other": ("Other", 0),
}
_BOUNDS = {
    "straggler": "Delayed by one rank",
    "compute": "Bound by compute",
    "memory": "Bound by memory",
    "communication": "Bound by communication",
    "input": "Bound by input",
    "host": "Bound by the host",
}


@dataclass(frozen=True)
class StepPart:
    """A part of a step's time in the bar; `x` and `width` are in per cent."""

    title: str
    color: int
    seconds: float
    share: float
    x: float

    @property
    def width(self) -> float:
        return round(100 * self.share, 3)

    @property
    def is_named(self) -> bool:
        return self.share >= LABEL + LETTER * len(self.title)

    @property
    def percent(self) -> str:
        """Return the share to a tenth of a per cent: a smaller share is not a bottleneck."""
        return formatting.percent(round(self.share, 3)) if self.share >= 0.0005 else f"< 0.1{formatting.NBSP}%"


@dataclass(frozen=True, kw_only=True)
class BottleneckPanel:
    title: str
    """"" if not enough was measured."""
    because: str
    remedy: str
    parts: list[StepPart]
    step_seconds: float
    facts: list[tuple[str, str]]
    at: datetime | None = None

    @property
    def alternative(self) -> str:
        """Return the bar as text, for screen readers."""
        shares = ", ".join(f"{part.title.lower()} {part.percent}" for part in self.parts)
        return f"A step of {formatting.duration(self.step_seconds)}: {shares}."


@dataclass(frozen=True, kw_only=True)
class Performance:
    """The performance section; fields are None or empty if unknown."""

    bottleneck: BottleneckPanel
    goodput: Goodput | None
    profiles: list[Profile]
    may_profile: bool
    more_profiles: int

    @property
    def is_measured(self) -> bool:
        """Return whether there is more to show than the bottleneck."""
        return bool(self.goodput or self.bottleneck.facts or self.profiles or self.may_profile)


def performance_panel(life: JobLife, *, may_change: bool) -> Performance | None:
    """Return the performance of a run of Vigil's trainer that has started; None for anything else."""
    if not life.job.job_kind.profiles or not any(attempt.started_at for attempt in life.attempts):
        return None
    stored_profiles = profiles(life.attempts)
    return Performance(
        bottleneck=_bottleneck(_newest(life.attempts), life),
        goodput=goodput(life.attempts, life.now),
        profiles=stored_profiles[:SHOWN_PROFILES],
        may_profile=may_change and life.latest.state == Attempt.State.RUNNING and not life.cancelling,
        more_profiles=max(0, len(stored_profiles) - SHOWN_PROFILES),
    )


@login_required
@require_POST
def profile(request: HttpRequest, job_id: int) -> HttpResponse:
    """Request a profile of the next steps; the page lists it once it is written."""
    user = user_of(request)
    job = get_object_or_404(Job.objects.visible_to(user).with_latest_attempt(), pk=job_id)
    steps, rank = whole(request.POST.get("steps") or str(profiling.STEPS)), whole(request.POST.get("rank") or "0")
    try:
        profiling.request_profile(user, job, steps=steps or 0, rank=rank or 0)
    except JobError as error:
        messages.error(request, str(error))
    else:
        messages.success(request, f"Rank {rank or 0} records its next {formatting.plural(steps or 0, 'step')}.")
    return redirect("job", job_id=job.pk)


@login_required
@require_safe
def download(request: HttpRequest, job_id: int, number: int, name: str) -> StreamingHttpResponse:
    """Download a trace as its rank wrote it."""
    job = get_object_or_404(Job.objects.visible_to(user_of(request)), pk=job_id)
    attempt = get_object_or_404(job.attempts.select_related("job"), number=number)
    try:
        file = files.download(attempt, name)
    except ProfileError as error:
        raise Http404(str(error)) from None
    return as_download(stream(request, file.pieces, "application/gzip"), file.name)


def _newest(attempts: list[Attempt]) -> Event | None:
    """Return the newest bottleneck that rank 0 of the newest attempt and incarnation reported."""
    rows = Event.objects.filter(attempt__in=attempts, kind=BOTTLENECK, rank=0)
    return rows.order_by("-attempt__number", "-incarnation", "-id").first()


def _bottleneck(event: Event | None, life: JobLife) -> BottleneckPanel:
    if event is None:
        when = (
            f"The analysis needs {MIN_STEPS} steps, one of them profiled."
            if life.latest.is_alive
            else "The job ended before enough steps were measured."
        )
        return BottleneckPanel(title="", because=when, remedy="", parts=[], step_seconds=0.0, facts=[])
    data = event.data
    bound = data.get("bound")
    parts = _parts(data.get("split"))
    return BottleneckPanel(
        title=_BOUNDS[bound] if bound in BOUNDS else "",
        because=untrusted.line(data.get("because"), MAX_CHARACTERS),
        remedy=untrusted.line(data.get("remedy"), MAX_CHARACTERS) if bound in BOUNDS else "",
        parts=parts,
        step_seconds=sum(part.seconds for part in parts),
        facts=list(_facts(data)),
        at=event.time,
    )


def _parts(split: object) -> list[StepPart]:
    """Return the parts of a step in order; empty if there are no valid values."""
    values = split if isinstance(split, Mapping) else {}
    seconds = {
        name: value for name in SPLIT if (value := untrusted.duration(values.get(name))) is not None and value > 0
    }
    total, at, parts = sum(seconds.values()), 0.0, []
    for name, value in seconds.items():
        title, color = _PARTS[name]
        parts.append(StepPart(title, color, value, value / total, round(100 * at / total, 3)))
        at += value
    return parts


def _facts(data: Mapping[str, Any]) -> list[tuple[str, str]]:
    facts = []
    if (mfu := untrusted.share(data.get("mfu"))) is not None:
        facts.append(("MFU", formatting.percent(mfu)))
    if (busy := untrusted.share(data.get("busy"))) is not None:
        facts.append(("Computing", f"{formatting.percent(busy)} of the sampled step"))
    if (matmul := untrusted.share(data.get("matmul"))) is not None:
        facts.append(("Matrix products", f"{formatting.percent(matmul)} of compute time"))
    steps, last = untrusted.count(data.get("steps")), untrusted.count(data.get("last_step"))
    if steps and last:
        each = untrusted.duration(data.get("step_seconds"))
        mean = f", {formatting.duration(each)} each" if each else ""
        facts.append(("Measured", f"{formatting.plural(steps, 'step')}, to step {formatting.count(last)}{mean}"))
    if sampled := untrusted.count(data.get("sampled_step")):
        facts.append(("Sampled", f"step {formatting.count(sampled)}"))
    return facts
