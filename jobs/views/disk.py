"""The page that tells which projects and jobs take the disk."""

from __future__ import annotations

import shutil
from typing import cast

from django.contrib.auth.decorators import login_required
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from jobs import disk, rundir
from portal import words
from portal.models import User


@login_required
@require_safe
def page(request: HttpRequest) -> HttpResponse:
    user = cast(User, request.user)
    if not disk.may_see(user):
        raise PermissionDenied("Leads of a project and sysadmins see this. Ask one of them.")
    uses = disk.use_of(user)
    context = {
        "section": "person",
        "uses": uses,
        "total": sum(use.bytes for use in uses),
        "unmeasured": sum(use.unmeasured for use in uses),
        "largest": disk.largest(user),
        "say": say(uses),
        "free": _free(),
    }
    return render(request, "jobs/disk.html", context)


def say(uses: list[disk.Use]) -> tuple[str, str]:
    """The sentence that leads the page: who holds most, and what of it could go."""
    most = uses[0]
    if not most.bytes:
        return "No run directory takes disk yet.", ""
    total = sum(use.bytes for use in uses)
    jobs = words.plural(most.jobs, "job")
    share = "" if len(uses) == 1 else f" of {words.disk(total)}"
    held = min(most.checkpoint_bytes, most.bytes)
    rest = f"{words.percent(held / most.bytes)} of it are checkpoints." if held else "None of it are checkpoints."
    return f"{most.project.slug} holds {words.disk(most.bytes)}{share} in {jobs}.", rest


def _free() -> int | None:
    """Bytes free where run directories are; None where that cannot be said."""
    try:
        return shutil.disk_usage(rundir.runs_root()).free
    except OSError:
        return None
