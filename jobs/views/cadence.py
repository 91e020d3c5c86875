"""Show how often a job saves, and handle the button that changes it."""

from __future__ import annotations

from dataclasses import dataclass

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.views.decorators.http import require_POST

from jobs.errors import JobError
from jobs.gathering import cadence as gathering
from jobs.gathering.cadence import SaveCadence
from jobs.gathering.job_life import JobLife
from jobs.models import Attempt, Job
from jobs.presenting.job_page import cadence as words
from jobs.submitting import cadence as ordering
from portal.access import user_of
from vigil_core import formatting
from vigil_core.untrusted import whole


@dataclass(frozen=True)
class SavesSection:
    """The section on the checkpoints tab.

    `offer` is the number of steps that the button proposes; None: nothing to gain.
    """

    cadence: SaveCadence
    sentences: tuple[str, str]
    facts: list[tuple[str, str]]
    offer: int | None


def saves_section(life: JobLife) -> SavesSection | None:
    found = gathering.measure(life)
    if found is None:
        return None
    is_over = life.latest.state == Attempt.State.COMPLETED
    offer = found.best_every if (found.is_worth_it or found.present_s is None) and not is_over else None
    return SavesSection(found, words.summary(found), words.facts(found, life.job.job_kind.unit), offer)


@login_required
@require_POST
def order(request: HttpRequest, job_id: int) -> HttpResponse:
    """Set how many steps lie between saves, for attempts submitted from now on.

    Empty restores the specification's value.
    """
    user = user_of(request)
    job = get_object_or_404(Job.objects.visible_to(user).with_latest_attempt(), pk=job_id)
    text = request.POST.get("every", "")
    every = whole(text) if text else None
    try:
        ordering.set_cadence(user, job, 0 if text and every is None else every)
    except JobError as error:
        messages.error(request, str(error))
    else:
        how = (
            "at the interval of its specification"
            if every is None
            else f"every {formatting.plural(every, job.job_kind.unit)}"
        )
        first = ordering.first_attempt_affected(list(job.attempts.order_by("number")))
        messages.success(request, f"From attempt {first} on, the job saves {how}.")
    return redirect("job_checkpoints", job_id=job.pk)
