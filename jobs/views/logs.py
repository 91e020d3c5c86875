"""A job's logs: any rank, launcher or batch script of any attempt; searched and paged on the server."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlencode

from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse, StreamingHttpResponse
from django.shortcuts import get_object_or_404, render
from django.utils.safestring import SafeString
from django.views.decorators.http import require_safe

from jobs.disk import logs
from jobs.disk.logs import BATCH, LogSelection
from jobs.errors import LogError
from jobs.models import Job
from jobs.presenting import ansi
from jobs.views.job import page_of
from portal.access import user_of
from portal.http.api import stream
from portal.http.download import as_download
from vigil_core.untrusted import plain, whole

PAGE = 400
MAX_LINES = 1_000


@dataclass(frozen=True)
class DrawnLine:
    """A log line as HTML."""

    offset: int
    html: SafeString
    level: str


@dataclass(frozen=True)
class LogChoice:
    """A log in the menu."""

    value: str
    title: str
    chosen: bool


@login_required
@require_safe
def page(request: HttpRequest, job_id: int) -> HttpResponse:
    job_page = page_of(request, job_id)
    selection = _selection(request, job_page.job)
    files = logs.available(selection.attempt)
    before = _number(request, "before")
    try:
        part = logs.read(job_page.job, selection, after=_number(request, "after"), before=before, limit=PAGE)
        problem = ""
    except LogError as error:
        part, problem = None, str(error)
    context = job_page.context(
        "logs",
        selection=selection,
        part=part,
        lines=_shown(part, selection) if part else [],
        problem=problem,
        choices=_choices(files, selection),
        incarnations=sorted({log.incarnation for log in files if log.rank == selection.rank}),
        log_title=_log_title(selection),
        further=bool(_number(request, "after")),
        address=_address(selection),
        older=part is not None and part.more_before and not selection.search,
    )
    return render(request, "jobs/logs.html", context)


@login_required
@require_safe
def lines(request: HttpRequest, job_id: int) -> HttpResponse:
    """Return more lines as list items, with the cursors in headers; or with `tail` the last few as a whole list."""
    jobs = Job.objects.visible_to(user_of(request)).select_related("latest")
    job = get_object_or_404(jobs, pk=job_id)
    selection = _selection(request, job)
    tail = _number(request, "tail")
    limit = min(tail or _number(request, "limit") or PAGE, MAX_LINES)
    after, before = _number(request, "after"), _number(request, "before")
    try:
        part = logs.read(job, selection, after=after, before=before, limit=limit)
    except LogError as error:
        if tail is not None:
            return render(request, "jobs/_log_tail.html", {"problem": str(error), "job": job})
        return HttpResponse(status=204)
    context = {"lines": _shown(part, selection), "job": job, "selection": selection}
    response = render(request, "jobs/_log_tail.html" if tail is not None else "jobs/_log_lines.html", context)
    response.headers["X-Log-Start"], response.headers["X-Log-End"] = str(part.start), str(part.end)
    response.headers["X-Log-More"] = "1" if part.more_after else "0"
    return response


@login_required
@require_safe
def download(request: HttpRequest, job_id: int) -> StreamingHttpResponse:
    """Download the whole log as a file."""
    job = get_object_or_404(Job.objects.visible_to(user_of(request)).select_related("latest"), pk=job_id)
    selection = _selection(request, job)
    try:
        file = logs.download(job, selection)
    except LogError as error:
        raise Http404(str(error)) from None
    return as_download(stream(request, file.pieces, "text/plain; charset=utf-8"), file.name)


def _shown(part: logs.LogPage, selection: LogSelection) -> list[DrawnLine]:
    return [
        DrawnLine(line.offset, ansi.spans(line.text, selection.search), ansi.level(line.text)) for line in part.lines
    ]


def _selection(request: HttpRequest, job: Job) -> LogSelection:
    """Return the log that the address selects; 404 for an unknown attempt or rank."""
    number = _number(request, "attempt")
    attempt = job.attempts.filter(number=number).first() if number is not None else job.latest
    if attempt is None:
        raise Http404(f"#{job.pk} has no attempt {number}.")
    rank_text = request.GET.get("rank", "0")
    if rank_text == BATCH:
        rank = None
    elif (size := whole(rank_text.removeprefix("-"), 2**31)) is not None:
        rank = -size if rank_text.startswith("-") else size
    else:
        raise Http404(f"There is no rank {rank_text}.")
    return LogSelection(attempt, rank, _number(request, "incarnation"), plain(request.GET.get("q", ""))[:200])


def _log_title(selection: LogSelection) -> str:
    name = logs.writer_of(selection.rank)
    return name[:1].lower() + name[1:]


def _address(selection: LogSelection) -> str:
    """Return URL parameters that select this log even after newer ones exist."""
    named = {"attempt": selection.attempt.number, "rank": selection.name, "incarnation": selection.incarnation}
    return urlencode({name: value for name, value in named.items() if value is not None})


def _choices(files: list[logs.LogFile], selection: LogSelection) -> list[LogChoice]:
    """Return every rank once, then launchers, then the batch script; the selected one even if it has no file yet."""
    titles: dict[str, str] = {}
    for log in files:
        if log.rank is None:
            titles[BATCH] = "Batch script"
        elif log.rank < 0:
            titles[str(log.rank)] = f"Launcher of node {-1 - log.rank}"
        else:
            titles[str(log.rank)] = f"Rank {log.rank}"
    titles.setdefault(selection.name, f"Rank {selection.name}")
    return [LogChoice(value, title, value == selection.name) for value, title in titles.items()]


def _number(request: HttpRequest, name: str) -> int | None:
    return whole(request.GET.get(name))
