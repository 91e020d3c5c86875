"""Compare two federated jobs."""

from __future__ import annotations

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.views.decorators.http import require_safe

from jobs.gathering import comparison
from jobs.listing.jobs import JobSearch
from jobs.models import Job
from portal.access import user_of
from vigil_core.untrusted import whole

CHOICES = 50


@login_required
@require_safe
def page(request: HttpRequest) -> HttpResponse:
    """Compare the jobs in the address; jobs that the user cannot see give 404."""
    user = user_of(request)
    federations = Job.objects.visible_to(user).filter(kind="federated")
    numbers = [number for text in request.GET.getlist("job")[:2] if (number := whole(text)) is not None]
    chosen = [get_object_or_404(federations, pk=number) for number in numbers]
    offered = list(JobSearch(kind="federated").page(user, limit=CHOICES, without=("spec",)).items)
    offered += [job for job in chosen if job not in offered]
    is_pair = len(chosen) == 2 and chosen[0] != chosen[1]
    context = {
        "section": "jobs",
        "offered": offered,
        "chosen": [*chosen, None, None][:2],
        "is_pair": is_pair,
        "found": comparison.compare_jobs(*chosen) if is_pair else None,
    }
    return render(request, "jobs/compare.html", context)
