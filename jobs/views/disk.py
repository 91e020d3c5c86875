"""Show how much disk each project and job uses."""

from __future__ import annotations

import shutil

from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.http import require_POST, require_safe

from jobs.disk import retention, rundir, usage
from portal.access import can, user_of
from portal.models import Project
from vigil_core import formatting


@login_required
@require_safe
def page(request: HttpRequest) -> HttpResponse:
    user = user_of(request)
    if not usage.may_see(user):
        raise PermissionDenied("Only project leads and sysadmins can see this. Ask one of them.")
    uses = usage.disk_use(user)
    context = {
        "section": "disk",
        "uses": uses,
        "total": sum(use.bytes for use in uses),
        "unmeasured": sum(use.unmeasured for use in uses),
        "largest": usage.largest(user),
        "headline": summary(uses),
        "free": _free(),
    }
    return render(request, "jobs/disk.html", context)


@login_required
@require_POST
def set_retention(request: HttpRequest, slug: str) -> HttpResponse:
    """Set how long a project keeps checkpoints; an empty field means forever."""
    user = user_of(request)
    project = get_object_or_404(Project.objects.visible_to(user), slug=slug)
    if not can(user, "manage", project):
        raise PermissionDenied(f"Only leads of {slug} can change this. Ask one of them.")
    days = request.POST.get("days", "").strip()
    if days and not (days.isascii() and days.isdecimal() and len(days) <= 4 and 1 <= int(days) <= 3650):
        messages.error(
            request, f"{days[:20]} is not a number of days. Enter 1 to 3,650, or leave it empty to keep all."
        )
    else:
        retention.set_retention(user, project, int(days) if days else None)
        how_long = (
            f"for {formatting.plural(int(days), 'day')} after a job’s end, then only the last one"
            if days
            else "forever"
        )
        messages.success(request, f"{slug} keeps checkpoints {how_long}.")
    return redirect("disk")


def summary(uses: list[usage.ProjectDiskUse]) -> tuple[str, str]:
    """Return the sentence that leads the page: who uses most, and how much of it is checkpoints."""
    most = uses[0]
    if not most.bytes and any(use.unmeasured for use in uses):
        return "Run directories are being measured.", "Sizes appear within minutes."
    if not most.bytes:
        return "No run directory uses disk space yet.", ""
    jobs = formatting.plural(most.jobs, "job")
    used, everything = formatting.disk(most.bytes), formatting.disk(sum(use.bytes for use in uses))
    used = used if len(uses) == 1 else f"all {used}" if used == everything else f"{used} of {everything}"
    return f"{most.project.slug} uses {used} in {jobs}.", _checkpoints(most)


def _checkpoints(use: usage.ProjectDiskUse) -> str:
    """Return how much of the project's disk use is checkpoints."""
    if use.is_inconsistent:
        reported = formatting.disk(use.checkpoint_bytes)
        return f"Its trainers reported {reported} in checkpoints, more than was found when it was measured."
    share = use.checkpoint_bytes / use.bytes
    part = "All" if share > 0.9995 else formatting.percent(share) if share else "None"
    return f"{part} of that is checkpoints."


def _free() -> int | None:
    """Return free bytes on the file system of run directories; None if unknown."""
    try:
        return shutil.disk_usage(rundir.runs_root()).free
    except OSError:
        return None
