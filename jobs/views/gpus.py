"""The tab with a job's GPU use: a map of all GPUs over time, curves of one, and the loss."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.http import require_safe

from jobs.gathering import gpu_tab
from jobs.gathering import gpus as gathered
from jobs.gathering.gpus import LAUNCHER, GpuHeat
from jobs.presenting.job_page import gpus as words
from jobs.presenting.job_page.gpus import GpuMap, GpuUsage
from jobs.views.job import JobPage, page_of
from nodes.presenting.gpu_fields import BY_NAME, FIELDS, GpuField
from portal.access import user_of
from vigil_core.untrusted import MAX_UNIX_TIME, whole

COLUMNS = 240
MAX_TABLE_ROWS = 200  # rows of the table under the map
REFRESHED = ("gpu-summary", "told")  # the element that htmx refreshes; "told" on pages opened before 0.2.0


@login_required
@require_safe
def page(request: HttpRequest, job_id: int) -> HttpResponse:
    """Show the tab, or for htmx only what changes while the job runs."""
    shown = page_of(request, job_id)
    chosen = BY_NAME.get(request.GET.get("field", ""), FIELDS[0])
    start, end = (whole(request.GET.get(name), MAX_UNIX_TIME) for name in ("from", "to"))
    if start is None or end is None or start >= end:
        start = end = None
    user = user_of(request)
    heat = gathered.heat(shown.job, chosen.name, start=start, end=end, columns=COLUMNS, user=user)
    drawn = _gpu_map(chosen, heat, shown)
    lead, rest = words.summary(drawn, source=heat.source, is_alive=shown.life.latest.is_alive)
    context = shown.context(
        "gpus",
        fields=FIELDS,
        chosen=chosen,
        is_zoomed=start is not None,
        picture=drawn,
        gpu_summary=(lead, rest if heat.source else _missing_field_text(chosen, shown)),
        source=words.SOURCES.get(heat.source, ""),
        rows=drawn.rows[:MAX_TABLE_ROWS],
        more=max(0, len(drawn.rows) - MAX_TABLE_ROWS),
        finding=gpu_tab.low_use(shown.life),
        heat_data=_map_payload(shown, heat, drawn, start, end),
    )
    is_part = request.headers.get("HX-Target") in REFRESHED
    response = render(request, "jobs/_gpus.html" if is_part else "jobs/gpus.html", context)
    response.headers["Vary"] = "HX-Request, HX-Target, Cookie"
    return response


def _gpu_map(chosen: GpuField, heat: GpuHeat, shown: JobPage) -> GpuMap:
    samples = [GpuUsage(row.node, row.gpu, row.uuid, row.mean) for row in heat.rows]
    return words.gpu_map(chosen, samples, gpu_tab.ranks_of(shown.life))


def _missing_field_text(chosen: GpuField, shown: JobPage) -> str:
    """Return why this field has no data although another has."""
    if chosen.name in gathered.fields(LAUNCHER):
        return ""
    other = gathered.heat(shown.job, FIELDS[0].name, columns=1)
    return f"Launchers do not log {chosen.title.lower()}; see {FIELDS[0].title.lower()}." if other.rows else ""


def _map_payload(shown: JobPage, heat: GpuHeat, drawn: GpuMap, start: int | None, end: int | None) -> dict[str, Any]:
    """Return the data for the drawing script: the map, and the loss of the same time."""
    begins = [attempt.started_at.timestamp() for attempt in shown.life.attempts[1:] if attempt.started_at]
    return {
        **drawn.as_json(),
        "job": shown.job.pk,
        "source": heat.source,
        "start": heat.start,
        "width": heat.width,
        "columns": heat.columns,
        "attempts": begins,
        "zone": timezone.get_current_timezone_name(),
        "alive": shown.life.latest.is_alive,
        "loss": gpu_tab.loss_between(shown.life, start, end),
    }
