"""REST: a job's metrics: curves for charts, and every point as CSV or Parquet."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from django.http import HttpResponse, StreamingHttpResponse
from ninja import Query, Router, Schema
from numpy.typing import NDArray
from pydantic import Field

from jobs.api.request import job_of
from jobs.intake.reports import owner_of
from jobs.models import Attempt, Job
from portal.http import csv_file, parquet
from portal.http.api import ApiRequest, Text, bad_field, json_response, stream
from portal.http.download import as_download
from portal.series import bands_read, read, store
from portal.series.read import Curve
from portal.series.store import Owner

router = Router(tags=["series"])
CSV_ROWS = 10_000  # chunk of the response
COLUMNS: dict[str, parquet.Kind] = {
    "attempt": "whole", "incarnation": "whole", "rank": "whole", "step": "whole", "time": "number", "value": "number"
}  # fmt: skip


class PointQuery(Schema):
    """A request for all points of one series of one rank."""

    name: Text = "loss"
    rank: int = Field(0, ge=-(10**6), lt=10**9, description="Negative: the launcher of node −rank−1.")
    all: bool = Field(False, description="Include superseded values of repeated steps.")
    start: int | None = Field(None, ge=0, lt=2**53, alias="from", description="First step.")
    end: int | None = Field(None, ge=0, lt=2**53, alias="to", description="Last step.")


class CurveQuery(PointQuery):
    """A request for several series of one rank, or across ranks."""

    name: list[Text] = Field(["loss"], max_length=32)  # type: ignore[assignment]
    points: int = Field(
        1000,
        ge=2,
        le=20_000,
        description="Approximate number of points; longer curves are reduced to min, max and mean.",
    )
    digits: int | None = Field(None, ge=3, le=15, description="Round to this many significant digits.")
    band: bool = Field(False, description="Return bands across ranks: min, median, max and the worst rank.")


class CurveShape(Schema):
    """A curve. Values that are not finite are null, and listed in `gaps`."""

    name: str
    rank: int | None
    attempt: int | None = Field(None, description="The attempt's number, with `all`.")
    incarnation: int | None = Field(None, description="With `all`.")
    step: list[int]
    value: list[float | None] | None = None
    min: list[float | None] | None = None
    max: list[float | None] | None = None
    mean: list[float | None] | None = None
    median: list[float | None] | None = None
    worst_rank: list[int] | None = Field(
        None, description="The rank with the largest value, or with NaN; -1 if unknown at this resolution."
    )
    gaps: list[tuple[int, int, str]] = []
    count: int | None = Field(None, description="Number of points that the curve represents; not with `band`.")
    last_step: int | None = Field(None, description="The last of these steps; `step` holds the start of each interval.")
    breaks: list[int] = Field([], description="Steps at which another attempt or incarnation takes over.")
    superseded: list[tuple[int, int]] = Field(
        [], description="Ranges (from, to) of repeated steps; use `all` for their previous values."
    )


class CurvePage(Schema):
    items: list[CurveShape]
    next: str | None = None
    version: int = Field(description="Version of the latest attempt: all frames up to it are included in these curves.")
    attempt: int | None = Field(description="Id of the latest attempt.")


class SeriesNames(Schema):
    items: list[str]
    next: str | None = None


@router.get("/{int:job_id}/series/names", response=SeriesNames, summary="Names of a job's series")
def names(request: ApiRequest, job_id: int) -> dict[str, Any]:
    """Return the names that /series accepts."""
    return {"items": store.names(list(_owners(job_of(request, job_id))))}


@router.get("/{int:job_id}/series", response=CurvePage, summary="Curves for charts")
def series(request: ApiRequest, job_id: int, query: Query[CurveQuery]) -> HttpResponse:
    """Return one rank's curve over all attempts; with `band`, bands across ranks.

    Each has about `points` points: longer curves are reduced to min, max and mean of intervals, which keeps spikes.
    """
    job = job_of(request, job_id)
    _check(query)
    # Read before the points: points that arrive in between are in a later frame, and maybe here too, but never lost.
    version = job.latest.version if job.latest else 0
    owners = _owners(job)
    lines = _bands if query.band else _lines
    items = [line for name in dict.fromkeys(query.name) for line in lines(owners, name, query)]
    body = {"items": items, "next": None, "version": version, "attempt": job.latest_id}
    return json_response(body)


@router.get(
    "/{int:job_id}/series.csv",
    summary="Every point of a series as CSV, sorted by its columns",
    openapi_extra=csv_file.description(tuple(COLUMNS)),
)
def csv(request: ApiRequest, job_id: int, query: Query[PointQuery]) -> StreamingHttpResponse:
    """Download every point, without averaging. Values that are not finite are NaN, Infinity and -Infinity."""
    job = job_of(request, job_id)
    _check(query)
    owners = _owners(job)
    curves = _curves(owners, query.name, query, points=None)
    return csv_file.csv_stream(request, f"job-{job.pk}.csv", tuple(COLUMNS), _csv_lines(_pieces(curves, owners)))


@router.get(
    "/{int:job_id}/series.parquet",
    summary="Every point of a series as Parquet, sorted by its columns",
    openapi_extra=parquet.openapi(COLUMNS),
)
def as_parquet(request: ApiRequest, job_id: int, query: Query[PointQuery]) -> StreamingHttpResponse:
    """Download the same as series.csv; `time` is in Unix seconds."""
    job = job_of(request, job_id)
    _check(query)
    owners = _owners(job)
    pieces = _pieces(_curves(owners, query.name, query, points=None), owners)
    answer = stream(request, parquet.pieces(COLUMNS, (piece.columns() for piece in pieces)), parquet.MEDIA_TYPE)
    return as_download(answer, f"job-{job.pk}.parquet")


def _owners(job: Job) -> dict[Owner, int]:
    """Return the attempt number by owner of the attempt's series, in order."""
    attempts = Attempt.objects.filter(job=job).order_by("number").values_list("pk", "number")
    return {owner_of(pk): number for pk, number in attempts}


def _check(query: PointQuery) -> None:
    if query.start is not None and query.end is not None and query.start > query.end:
        raise bad_field("from", f"{query.start} is after to = {query.end}. Swap them.")


def _curves(owners: dict[Owner, int], name: str, query: PointQuery, *, points: int | None) -> list[Curve]:
    options: dict[str, Any] = {"rank": query.rank, "start": query.start, "end": query.end, "points": points}
    if query.all:
        return read.incarnation_curves(list(owners), name, **options)
    return [read.curve(list(owners), name, **options)]


def _lines(owners: dict[Owner, int], name: str, query: CurveQuery) -> Iterator[dict[str, Any]]:
    for curve in _curves(owners, name, query, points=query.points):
        columns = {key: getattr(curve, key) for key in ("value", "min", "max", "mean")}
        line: dict[str, Any] = {
            "name": name,
            "rank": query.rank,
            "step": curve.step.tolist(),
            **{key: short(column, query.digits) for key, column in columns.items() if column is not None},
            "gaps": curve.gaps,
            "count": curve.count,
            "last_step": curve.last_step,
            "breaks": curve.breaks,
        }
        if not query.all:
            line["superseded"] = curve.superseded
        if query.all and len(curve.source):
            owner, line["incarnation"] = curve.sources[int(curve.source[0])]
            line["attempt"] = owners[owner]
        yield line


def _bands(owners: dict[Owner, int], name: str, query: CurveQuery) -> Iterator[dict[str, Any]]:
    band = bands_read.band(list(owners), name, start=query.start, end=query.end, points=query.points)
    columns = {key: short(getattr(band, key), query.digits) for key in ("min", "median", "max")}
    exact = {key: getattr(band, key).tolist() for key in ("step", "worst_rank")}
    yield {"name": name, "rank": None, **exact, **columns, "gaps": band.gaps}


def short(column: NDArray[np.float64], digits: int | None) -> list[float]:
    """Round values to significant digits: charts need few, and each is a byte in every response."""
    if digits is not None:
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            places = digits - 1 - np.floor(np.log10(np.abs(column)))
            # Powers of ten are exact up to 22: dividing a whole number by one gives the shortest decimal.
            scale = 10.0 ** np.minimum(np.abs(places), 22)
            short = np.where(places >= 0, np.round(column * scale) / scale, np.round(column / scale) * scale)
        column = np.where(np.isfinite(short) & (np.abs(places) <= 22), short, column)
    return list(column.tolist())


@dataclass(frozen=True)
class _SeriesPoints:
    """Some thousand neighbouring points, in the order of the columns."""

    attempt: NDArray[np.int64]
    incarnation: NDArray[np.int64]
    rank: int
    step: NDArray[np.int64]
    time: NDArray[np.float64]
    value: NDArray[np.float64]

    def columns(self) -> dict[str, parquet.Column]:
        return {name: getattr(self, name) for name in COLUMNS} | {"rank": np.full(len(self.step), self.rank)}


def _pieces(curves: list[Curve], owners: dict[Owner, int]) -> Iterator[_SeriesPoints]:
    for curve in curves:
        assert curve.value is not None
        number = np.array([owners[owner] for owner, _ in curve.sources], np.int64)
        incarnation = np.array([incarnation for _, incarnation in curve.sources], np.int64)
        if not len(curve.step):
            continue
        attempts, incarnations = number[curve.source], incarnation[curve.source]
        order = np.lexsort((curve.step, incarnations, attempts))
        for at in range(0, len(order), CSV_ROWS):
            part = order[at : at + CSV_ROWS]
            yield _SeriesPoints(
                attempts[part], incarnations[part], curve.rank, curve.step[part], curve.time[part], curve.value[part]
            )


def _csv_lines(pieces: Iterator[_SeriesPoints]) -> Iterator[str]:
    for piece in pieces:
        columns = (piece.attempt, piece.incarnation, piece.step, piece.time, piece.value)
        yield "".join(
            f"{a},{i},{piece.rank},{s},{t!r},{_number(v)}\n"
            for a, i, s, t, v in zip(*map(_plain, columns), strict=True)
        )


def _plain(column: Any) -> list[Any]:
    return list(column.tolist())


def _number(value: float) -> str:
    return repr(value) if np.isfinite(value) else read.word(value)
