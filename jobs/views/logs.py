"""A job's logs."""

from __future__ import annotations

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from jobs.views.detail import page_of


@login_required
@require_safe
def page(request: HttpRequest, job_id: int) -> HttpResponse:
    return render(request, "jobs/logs.html", page_of(request, job_id).context("logs"))


@login_required
@require_safe
def lines(request: HttpRequest, job_id: int) -> HttpResponse:
    return HttpResponse("")
