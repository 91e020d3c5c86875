"""REST: the output of ranks, launchers and batch scripts."""

from dataclasses import replace
from typing import Any, Literal

from django.http import StreamingHttpResponse
from ninja import Query, Router, Schema
from pydantic import Field

from jobs.api.request import job_of
from jobs.disk import logs
from jobs.disk.logs import LogSelection
from jobs.models import Attempt, Job
from portal.http.api import ApiRequest, Text, stream
from portal.http.download import as_download
from portal.http.openapi import described
from portal.http.problems import Problem

router = Router(tags=["logs"])
TEXT = {"type": "string"}
NO_LOG = "No such job that you can see, or no such log yet."
Rank = int | Literal["batch"]


class FileQuery(Schema):
    """A log, selected by attempt, rank and incarnation."""

    attempt: int | None = Field(None, ge=1, lt=2**31, description="Attempt number; default: the latest.")
    rank: Rank = Field(0, description="Negative: the launcher of node −rank−1. `batch`: the batch script's output.")
    incarnation: int | None = Field(None, ge=0, lt=10**9, description="Default: the newest.")


class LogLineQuery(FileQuery):
    """A log and the part of it to return: the last lines, unless `after` or `before` is given."""

    after: int | None = Field(None, ge=0, lt=2**62, description="Offset: return lines from there on.")
    before: int | None = Field(None, ge=0, lt=2**62, description="Offset: return lines that end there.")
    search: Text = Field(
        "", description="Return only lines that contain this text, ignoring case, from `after` or the beginning on."
    )
    limit: int = Field(500, ge=1, le=logs.MAX_LINES)


class AttemptQuery(Schema):
    attempt: int | None = Field(None, ge=1, lt=2**31, description="Attempt number; default: the latest.")


class LogLineShape(Schema):
    offset: int
    text: str


class LogPageShape(Schema):
    items: list[LogLineShape]
    start: int = Field(description="Offset of the first line; send it as `before` to get earlier lines.")
    end: int = Field(
        description="Offset after the last line; send it as `after` to get later lines, including new ones."
    )
    size: int = Field(description="Bytes of the whole log.")
    attempt: int
    next: str | None = Field(description="`end`, while there is more.")


class LogFileShape(Schema):
    rank: Rank
    incarnation: int
    bytes: int


class LogFiles(Schema):
    items: list[LogFileShape]
    next: str | None = None


@router.get(
    "/{int:job_id}/logs",
    response=LogPageShape,
    summary="Lines of a log",
    openapi_extra=described(errors={404: NO_LOG}),
)
def lines(request: ApiRequest, job_id: int, query: Query[LogLineQuery]) -> dict[str, Any]:
    """Return the last lines, or those after or before an offset. To follow a log, send `end` as the next `after`."""
    job = job_of(request, job_id)
    selection = replace(_selection(job, query), search=query.search)
    page = logs.read(job, selection, after=query.after, before=query.before, limit=query.limit)
    return {
        "items": [{"offset": line.offset, "text": line.text} for line in page.lines],
        "start": page.start,
        "end": page.end,
        "size": page.size,
        "attempt": selection.attempt.number,
        "next": str(page.end) if page.more_after else None,
    }


@router.get(
    "/{int:job_id}/logs/files",
    response=LogFiles,
    summary="A job's logs",
    openapi_extra=described(errors={404: NO_LOG}),
)
def files(request: ApiRequest, job_id: int, query: Query[AttemptQuery]) -> dict[str, Any]:
    """Return the logs that exist: one per rank and incarnation, the launchers' and the batch script's."""
    found = logs.available(_attempt(job_of(request, job_id), query.attempt))
    items = [
        {"rank": "batch" if log.rank is None else log.rank, "incarnation": log.incarnation, "bytes": log.bytes}
        for log in found
    ]
    return {"items": items}


@router.get(
    "/{int:job_id}/logs/file",
    summary="A whole log as a file",
    openapi_extra=described(
        {"responses": {200: {"description": "As written", "content": {"text/plain": {"schema": TEXT}}}}},
        errors={404: NO_LOG},
    ),
)
def file(request: ApiRequest, job_id: int, query: Query[FileQuery]) -> StreamingHttpResponse:
    """Download the log as it is now, terminal colours included."""
    job = job_of(request, job_id)
    download = logs.download(job, _selection(job, query))
    return as_download(stream(request, download.pieces, "text/plain; charset=utf-8"), download.name)


def _selection(job: Job, query: FileQuery) -> LogSelection:
    return LogSelection(_attempt(job, query.attempt), _rank(query.rank), query.incarnation)


def _attempt(job: Job, number: int | None) -> Attempt:
    found = job.latest if number is None else Attempt.objects.filter(job=job, number=number).first()
    if found is None:
        raise Problem(404, f"#{job.pk} has no attempt {number}.")
    return found


def _rank(rank: Rank) -> int | None:
    if rank == "batch":
        return None
    if not -(10**6) < int(rank) < 10**9:
        raise Problem(404, f"There is no rank {rank}.")
    return int(rank)
