"""Handle the buttons of a job's page. Each view calls one function and reports its result."""

from __future__ import annotations

import uuid

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.http import require_POST

from jobs.errors import JobError
from jobs.models import Job
from jobs.presenting.edit_form import EditForm
from jobs.submitting import submit
from jobs.submitting.release import release
from portal.access import can, user_of
from vigil_core import formatting
from vigil_core.untrusted import whole

MAX_JOBS = 100
_NO_CHECKPOINT = "Its processes end without a last checkpoint."


def _job(request: HttpRequest, job_id: int) -> Job:
    return get_object_or_404(Job.objects.visible_to(user_of(request)).with_latest_attempt(), pk=job_id)


@login_required
@require_POST
def cancel(request: HttpRequest, job_id: int) -> HttpResponse:
    job = _job(request, job_id)
    try:
        is_killed = submit.cancel(user_of(request), job)
    except JobError as error:
        messages.error(request, str(error))
    else:
        if is_killed:
            messages.success(request, f"Killing {job.name}, which was already being cancelled. {_NO_CHECKPOINT}")
            return _back(request, job)
        has_started = job.latest is not None and job.latest.started_at is not None
        how = "The ranks save a last checkpoint and stop." if has_started else "It has not started."
        if job.is_attached:
            how = "Slurm will end it."
        messages.success(request, f"Cancelling {job.name}. {how}")
    return _back(request, job)


@login_required
@require_POST
def release_job(request: HttpRequest, job_id: int) -> HttpResponse:
    """Ask the scheduler to release a held job."""
    job = _job(request, job_id)
    try:
        release(user_of(request), job)
    except JobError as error:
        messages.error(request, str(error))
    else:
        messages.success(request, f"Releasing {job.name}. It starts when its turn comes.")
    return _back(request, job)


@login_required
@require_POST
def kill(request: HttpRequest, job_id: int) -> HttpResponse:
    """Kill a job at once."""
    job = _job(request, job_id)
    try:
        submit.kill(user_of(request), job)
    except JobError as error:
        messages.error(request, str(error))
    else:
        messages.success(request, f"Killing {job.name}. {_NO_CHECKPOINT}")
    return _back(request, job)


@login_required
@require_POST
def cancel_several(request: HttpRequest) -> HttpResponse:
    """Cancel the jobs selected in the list."""
    numbers = [whole(number) for number in request.POST.getlist("job")[:MAX_JOBS]]
    chosen = [number for number in numbers if number is not None]
    user, done = user_of(request), 0
    for job in Job.objects.visible_to(user).with_latest_attempt().filter(pk__in=chosen):
        try:
            submit.cancel(user, job, may_kill=False)  # a job that is saving keeps its grace period
            done += 1
        except JobError as error:
            messages.error(request, str(error))
    if done:
        messages.success(
            request, f"Cancelling {formatting.plural(done, 'job')}. The ranks save a last checkpoint and stop."
        )
    return redirect(_return_address(request) or reverse("jobs"))


@login_required
@require_POST
def resume(request: HttpRequest, job_id: int) -> HttpResponse:
    job = _job(request, job_id)
    step, steps = _parse_number(request.POST.get("step")), _parse_number(request.POST.get("steps"))
    generation = None
    if (chosen := whole(request.POST.get("checkpoint"))) is not None:
        checkpoint = get_object_or_404(job.checkpoints, pk=chosen)
        step, generation = checkpoint.step, checkpoint.generation
    user, key = user_of(request), request.POST.get("key") or uuid.uuid4().hex
    try:
        attempt = submit.resume(user, job, step=step, generation=generation, steps=steps, key=key)
    except JobError as error:
        messages.error(request, str(error))
        return _back(request, job)
    unit = job.job_kind.unit
    start = (
        f" from {unit} {formatting.count(attempt.resume_from.step)}" if attempt.resume_from else " from the beginning"
    )
    messages.success(request, f"Attempt {attempt.number} is queued and starts{start}.")
    return redirect("job", job_id=job.pk)


@login_required
@require_POST
def pin(request: HttpRequest, job_id: int, checkpoint_id: int) -> HttpResponse:
    """Pin or unpin a checkpoint. htmx replaces the button with its new state."""
    user, job = user_of(request), _job(request, job_id)
    checkpoint = get_object_or_404(job.checkpoints, pk=checkpoint_id)
    problem = ""
    try:
        submit.pin(user, job, checkpoint, pinned=request.POST.get("pinned") == "1")
    except JobError as error:
        problem = str(error)
    if "HX-Request" in request.headers:
        checkpoint.refresh_from_db()
        context = {"job": job, "checkpoint": checkpoint, "may_change": can(user, "change", job), "problem": problem}
        return render(request, "jobs/_pin_button.html", context)
    if problem:
        messages.error(request, problem)
    return redirect("job_checkpoints", job_id=job.pk)


@login_required
@require_POST
def edit(request: HttpRequest, job_id: int) -> HttpResponse:
    """Change name, tags and notes: what people may change after submission."""
    job = _job(request, job_id)
    form = EditForm(request.POST)
    if not form.is_valid():
        for field, problems in form.errors.items():
            messages.error(request, f"Not changed. {field.capitalize()}: {' '.join(str(p) for p in problems)}")
        return _back(request, job)
    try:
        submit.change(user_of(request), job, **form.cleaned_data)
    except JobError as error:
        messages.error(request, str(error))
    else:
        messages.success(request, "Changed.")
    return _back(request, job)


@login_required
@require_POST
def delete(request: HttpRequest, job_id: int) -> HttpResponse:
    job = _job(request, job_id)
    try:
        submit.delete(user_of(request), job)
    except JobError as error:
        messages.error(request, str(error))
        return _back(request, job)
    what = "metrics; its own files stay" if job.is_attached else "metrics, logs and checkpoints"
    messages.success(request, f"Deleted #{job_id} {job.name} with its {what}.")
    return redirect("jobs")


def _parse_number(text: str | None) -> int | None:
    """Return a number as people type it: 12,000 and 12_000 as well."""
    return whole((text or "").replace(",", "").replace("_", "").strip())


def _return_address(request: HttpRequest) -> str:
    """Return the page that the person came from, if it is on this site.

    It must be an address: `redirect` would resolve a bare word as a view's name.
    """
    back = request.POST.get("back") or request.META.get("HTTP_REFERER", "")
    ours = "/" in back and url_has_allowed_host_and_scheme(
        back, {request.get_host()}, require_https=request.is_secure()
    )
    return back if ours else ""


def _back(request: HttpRequest, job: Job) -> HttpResponse:
    return redirect(_return_address(request) or reverse("job", args=[job.pk]))
