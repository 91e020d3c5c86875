"""REST: how often nodes and programs fail, what it costs, and what to expect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import date
from typing import Annotated, Any

from django.http import StreamingHttpResponse
from django.utils import timezone
from ninja import Query, Router, Schema
from pydantic import Field

from jobs.failures import forecasting, report, sentences
from jobs.failures.forecasting import MAX_DAYS, MAX_NODES, MAX_SECONDS
from jobs.failures.kinds import KINDS
from jobs.failures.report import GROUPINGS, FailureFilter, FailureRow
from jobs.reliability.offenders import Offender
from jobs.reliability.published import PUBLISHED, PublishedRate
from jobs.reliability.rate import AssumedRate, Rate
from portal.http import csv_file
from portal.http.api import ApiRequest, Cursor, Text, bad_field, one_of
from portal.http.openapi import described
from portal.models import User
from vigil_core import formatting
from vigil_core.untrusted import whole

router = Router(tags=["cluster"])
CSV_HEADER = (
    *("by", "name", "failures", "node_days", "per_1000_node_days", "per_1000_low", "per_1000_high"),
    *("mttf_days", "mttf_days_low", "mttf_days_high", "lost_gpu_hours", "detect_seconds", "recover_seconds"),
)
CSV_ROWS = 20_000  # at most
MAX_WINDOW = 366


class ReliabilityQuery(Schema):
    """The days, grouping and project of the report."""

    days: int = Field(30, ge=1, le=MAX_WINDOW, description="Number of days in UTC; the last one is today so far.")
    by: Annotated[str, one_of(GROUPINGS, "a grouping")] = Field("cause", description=", ".join(GROUPINGS))
    kind: Annotated[str, one_of(KINDS, "a kind of failure")] = Field(
        "all", description="all, machines (failures that hit any program), or programs."
    )
    project: Text = Field("", description="Project slug: count only its jobs.")


class ReliabilityPageQuery(ReliabilityQuery):
    limit: int = Field(50, ge=1, le=200, description="Items a page.")
    cursor: Cursor


class ForecastQuery(Schema):
    """The planned run."""

    nodes: int = Field(ge=1, le=MAX_NODES)
    days: float = Field(gt=0, le=MAX_DAYS)
    save_seconds: float = Field(
        forecasting.SAVE_S, gt=0, le=MAX_SECONDS, description="Cost of a save, including all its consequences."
    )
    restart_seconds: float | None = Field(
        None, ge=0, le=MAX_SECONDS, description="From a failure until training resumes; default: as observed here."
    )
    window: int = Field(30, ge=1, le=MAX_WINDOW, description="Number of days over which the rate is measured.")


class RateShape(Schema):
    """Failures per node-day, with an exact 95 % interval for counts."""

    failures: int
    node_days: float = Field(description="Node-days allocated to jobs.")
    per_1000_node_days: float | None
    per_1000_interval: list[float] | None
    mttf_days: float | None = Field(description="Per node. Null: there are fewer than three failures.")
    mttf_days_interval: list[float] | None


class FailuresShape(RateShape):
    """The failures of one cause, node, rack, partition, project or week."""

    name: str = Field(description="For a week, its Monday.")
    lost_gpu_hours: float = Field(
        description="Work since the last checkpoint, plus allocated time until training resumed."
    )
    detect_seconds: float | None = Field(description="Median time from the last step to the detected end.")
    recover_seconds: float | None = Field(description="Median time from the end until training resumed.")


class OffenderShape(Schema):
    """A node that fails more often than its node-days explain."""

    node: str
    failures: int
    expected: float = Field(description="Expected failures at the rate of the other nodes.")
    programs: int = Field(description="Number of different programs that failed.")
    chance: float = Field(description="Probability that any node fails this often by chance.")
    score: float = Field(description="Minus the decimal logarithm of the chance.")
    blame: str = Field(description="node: different programs fail on it; program: few programs fail repeatedly.")


class PublishedShape(Schema):
    name: str
    per_1000_node_days: float
    how: str = Field(description="What was counted over what.")
    source: str


class Reliability(Schema):
    items: list[FailuresShape]
    next: str | None
    days: int
    since: date = Field(description="The first of the days.")
    by: str
    kind: str
    text: str = Field(description="Summary in a few sentences.")
    total: FailuresShape
    effective_time: float | None = Field(
        description="Share of the queued and allocated time of ended jobs that produced useful steps."
    )
    offenders: list[OffenderShape] = Field(description="The worst first.")
    published: list[PublishedShape] = Field(description="Published failure rates of other clusters.")


class CurvePoint(Schema):
    interval_seconds: float
    effective_time: float


class ForecastShape(Schema):
    """Expected failures of this many nodes over this many days."""

    nodes: int
    days: float
    save_seconds: float
    restart_seconds: float
    is_assumed: bool = Field(description="The rate is a published one, as too few failures were observed here.")
    per_1000_node_days: float
    expected_failures: float
    expected_failures_interval: list[float] | None = Field(description="Null: the rate is assumed.")
    chance_of_none: float
    chance_of_none_interval: list[float] | None
    mtbf_seconds: float = Field(description="Mean time between failures of all nodes together.")
    best_interval_seconds: float = Field(description="Save interval with the largest useful share.")
    young_interval_seconds: float = Field(description="√(2·C·MTBF), Young's approximation for cheap saves.")
    effective_time: float = Field(description="Share of useful time at the best interval.")
    curve: list[CurvePoint]
    text: str


@router.get("/reliability", response=Reliability, summary="Failure rates of nodes and programs, and their cost")
def reliability(request: ApiRequest, query: Query[ReliabilityPageQuery]) -> dict[str, Any]:
    """Return the failure rates. Failures are incidents, by their newest verdict or a person's correction.

    Depending on the site, everybody's failures are counted or those of your projects.
    """
    skip = whole(query.cursor or "0", 2**31)
    if skip is None:
        raise bad_field("cursor", "Invalid cursor. Start without one.")
    now, filters = timezone.now(), _filters(query)
    failure_report = report.find(request.auth, filters, now)
    page = failure_report.rows[skip : skip + query.limit]
    return {
        "items": [_row(row) for row in page],
        "next": str(skip + query.limit) if len(failure_report.rows) > skip + query.limit else None,
        "days": filters.days,
        "since": filters.since(now),
        "by": filters.by,
        "kind": filters.kind,
        "text": formatting.plain_spaces(" ".join(sentences.summary(failure_report, filters)).strip()),
        "total": _row(failure_report.total),
        "effective_time": failure_report.effective,
        "offenders": [_offender(offender) for offender in failure_report.offenders[:200]],
        "published": [_published(rate) for rate in PUBLISHED],
    }


@router.get(
    "/reliability.csv",
    summary="The same report as CSV",
    openapi_extra=described(csv_file.description(CSV_HEADER, most=CSV_ROWS)),
)
def reliability_csv(request: ApiRequest, query: Query[ReliabilityQuery]) -> StreamingHttpResponse:
    """Download the report as CSV. Names that a spreadsheet would read as a formula are prefixed with an apostrophe."""
    filters, user = _filters(query), request.auth
    name = f"reliability-{filters.by}-{filters.days}d.csv"
    return csv_file.csv_response(request, name, CSV_HEADER, lambda: _csv_rows(user, filters))


@router.get("/reliability/forecast", response=ForecastShape, summary="Forecast failures for N nodes over T days")
def reliability_forecast(request: ApiRequest, query: Query[ForecastQuery]) -> dict[str, Any]:
    """Forecast failures from the interruptions of the last days, assuming that they occur at random.

    Interruptions are failures that may hit any run, and those after which a job resumed; each takes a run back
    to its last save.
    """
    observed, recover = report.interruptions(request.auth, FailureFilter(days=query.window), timezone.now())
    plan = forecasting.plan_of(query.nodes, query.days, query.save_seconds, query.restart_seconds, recover)
    forecast = forecasting.from_observed(plan, observed)
    is_assumed = isinstance(forecast.rate, AssumedRate)
    return {
        "nodes": plan.nodes,
        "days": plan.days,
        "save_seconds": plan.save_seconds,
        "restart_seconds": plan.restart_seconds,
        "is_assumed": is_assumed,
        "per_1000_node_days": 1000 * forecast.rate.per_day,
        "expected_failures": forecast.failures,
        "expected_failures_interval": None if is_assumed else [forecast.failures_low, forecast.failures_high],
        "chance_of_none": forecast.no_failure_probability,
        "chance_of_none_interval": None if is_assumed else list(forecast.no_failure_probability_interval),
        "mtbf_seconds": forecast.mtbf_seconds,
        "best_interval_seconds": forecast.best_seconds,
        "young_interval_seconds": forecast.young_seconds,
        "effective_time": forecast.best_useful_share,
        "curve": [{"interval_seconds": period, "effective_time": fraction} for period, fraction in forecast.curve()],
        "text": formatting.plain_spaces(" ".join(sentences.forecast_text(forecast))),
    }


def _filters(query: ReliabilityQuery) -> FailureFilter:
    return FailureFilter(days=query.days, by=query.by, kind=query.kind, project=query.project)


def _rate(rate: Rate) -> dict[str, Any]:
    often, until = rate.per_thousand_interval, rate.mtbf_days_interval
    return {
        "failures": rate.failures,
        "node_days": round(rate.node_days, 4),
        "per_1000_node_days": rate.per_thousand,
        "per_1000_interval": list(often) if often else None,
        "mttf_days": rate.mtbf_days,
        "mttf_days_interval": list(until) if until else None,
    }


def _row(row: FailureRow) -> dict[str, Any]:
    times = {"detect_seconds": row.detect_s, "recover_seconds": row.recover_s}
    return {"name": row.name, **_rate(row.rate), "lost_gpu_hours": round(row.lost_gpu_hours, 4), **times}


def _offender(offender: Offender) -> dict[str, Any]:
    counts = offender.counts
    shape = {
        "node": counts.node,
        "failures": counts.failures,
        "expected": offender.expected,
        "programs": counts.programs,
    }
    return {
        **shape,
        "chance": offender.chance,
        "score": offender.score,
        "blame": "node" if offender.is_node else "program",
    }


def _published(rate: PublishedRate) -> dict[str, Any]:
    return {"name": rate.name, "per_1000_node_days": rate.per_thousand, "how": rate.basis, "source": rate.source}


def _csv_rows(user: User, filters: FailureFilter) -> Iterator[Sequence[object]]:
    for row in report.find(user, filters, timezone.now()).rows[:CSV_ROWS]:
        rate = row.rate
        often, until = rate.per_thousand_interval or ("", ""), rate.mtbf_days_interval or ("", "")
        values = (rate.per_thousand, *often, rate.mtbf_days, *until, row.lost_gpu_hours, row.detect_s, row.recover_s)
        numbers = (f"{value:.4f}" if isinstance(value, float) else "" for value in values)
        yield [filters.by, row.name, rate.failures, f"{rate.node_days:.4f}", *numbers]
