"""REST: sweeps. Their jobs are ordinary jobs: GET /jobs?sweep=ID."""

from datetime import datetime
from typing import Any

from django.conf import settings
from django.http import HttpResponse
from ninja import Query, Router, Schema, Status
from pydantic import Field

from jobs.api.request import NOT_YOURS, SUBMISSION, key_of, sweep_of, sweep_request
from jobs.gathering.sweep_standing import compare_jobs, measured_by
from jobs.models import Sweep
from jobs.models.sweep import states_of
from jobs.presenting.sweep_standing import SweepStanding
from jobs.submitting import sweeps as lifecycle
from portal.http.api import ApiRequest, Cursor, Limit, Text
from portal.http.openapi import described
from portal.http.paging import SortOrder, page

MAX_SETTINGS = 100  # of up to 1,000, the best first

router = Router(tags=["sweeps"])


class SweepShape(Schema):
    id: int
    name: str
    project: str
    owner: str
    values: dict[str, list[Any]] = Field(description="Varied values, by path.")
    at_once: int | None = Field(description="Maximum number of its jobs that run at the same time.")
    counts: dict[str, int] = Field(description="Number of its jobs by state.")
    jobs: int
    over: bool = Field(description="All jobs have ended, and Vigil restarts none of them.")
    stopped_why: str = Field(description="Why Vigil stopped the sweep; empty if it did not.")
    created_at: datetime
    url: str


class RefusedCombination(Schema):
    values: dict[str, Any]
    message: str


class SettingShape(Schema):
    values: dict[str, Any] = Field(description="Its values by path, without the seed.")
    mean: float | None = Field(description="Mean over measured seeds; null: none.")
    spread: float | None = Field(description="Standard deviation over seeds; null: fewer than two are measured.")
    seeds: int = Field(description="Number of measured seeds.")
    jobs: list[int]


class StandingShape(Schema):
    metric: str
    text: str = Field(description="The comparison in a sentence, as on the page.")
    best: list[int] = Field(
        description="The best job; in a sweep over seeds all jobs of the setting with the best mean. Empty where the"
        " difference to the next setting is not significant."
    )
    settings: list[SettingShape] = Field(description="In a sweep over seeds: the best first, 100 at most.")


class SweepDetail(SweepShape):
    spec_toml: str
    standing: StandingShape | None = Field(description="How its jobs compare; null: nothing measured yet.")
    refused: list[RefusedCombination] = Field(description="Combinations without a job, and why.")


class Sweeps(Schema):
    items: list[SweepShape]
    next: str | None


class SweepQuery(Schema):
    project: list[Text] = []
    owner: Text = ""
    limit: Limit
    cursor: Cursor


@router.post(
    "",
    response={200: SweepDetail, 201: SweepDetail},
    summary="Submit a sweep",
    openapi_extra=described(SUBMISSION),
)
def submit(request: ApiRequest, response: HttpResponse) -> Status[dict[str, Any]]:
    """Submit a job for each combination of the values under [sweep.over]; under Slurm they are one array."""
    key = key_of(request)
    body = sweep_request(request)
    sweep, created = lifecycle.submit(request.auth, body.spec, spec_toml=body.spec_toml, key=key, code=body.code)
    response.headers["Location"] = f"/api/v1/sweeps/{sweep.pk}"
    return Status(201 if created else 200, sweep_detail(sweep))


@router.get("", response=Sweeps, summary="Sweeps you can see, newest first")
def sweeps(request: ApiRequest, query: Query[SweepQuery]) -> dict[str, Any]:
    """Return sweeps, each with its number of jobs by state."""
    rows = Sweep.objects.visible_to(request.auth).select_related("project", "owner")
    rows = rows.filter(project__slug__in=query.project) if query.project else rows
    rows = rows.filter(owner__username=query.owner) if query.owner else rows
    found = page(rows, SortOrder("id", descending=True), cursor=query.cursor, limit=query.limit)
    stand = states_of(found.items)
    return {"items": [_shape(sweep, *stand[sweep.pk]) for sweep in found.items], "next": found.next}


@router.get("/{int:sweep_id}", response=SweepDetail, summary="One sweep")
def sweep(request: ApiRequest, sweep_id: int) -> dict[str, Any]:
    """Return a sweep with its spec as it was written. List its jobs with GET /api/v1/jobs?sweep=ID."""
    return sweep_detail(sweep_of(request, sweep_id))


@router.post(
    "/{int:sweep_id}/cancel",
    response={202: SweepShape},
    summary="Cancel all jobs of a sweep that have not ended",
    openapi_extra=described(
        errors={
            403: NOT_YOURS,
            409: "All of its jobs have already ended.",
        }
    ),
)
def cancel(request: ApiRequest, sweep_id: int) -> Status[dict[str, Any]]:
    """Cancel all jobs: running ones save a last checkpoint and stop, pending ones leave the queue."""
    found = sweep_of(request, sweep_id, "change", doing="cancelled")
    lifecycle.cancel(request.auth, found)
    return Status(202, sweep_shape(found))


def sweep_shape(sweep: Sweep) -> dict[str, Any]:
    return _shape(sweep, sweep.counts(), sweep.is_over())


def _shape(sweep: Sweep, counts: dict[str, int], is_over: bool) -> dict[str, Any]:
    return {
        "id": sweep.pk,
        "name": sweep.name,
        "project": sweep.project.slug,
        "owner": sweep.owner.username,
        "values": sweep.over,
        "at_once": sweep.at_once,
        "counts": counts,
        "jobs": sum(counts.values()),
        "over": is_over,
        "stopped_why": sweep.stopped_why,
        "created_at": sweep.created_at,
        "url": f"{settings.VIGIL_PUBLIC_URL}/sweeps/{sweep.pk}",
    }


def sweep_detail(sweep: Sweep) -> dict[str, Any]:
    refused = [{"values": values, "message": message} for values, message in sweep.refused]
    shape = sweep_shape(sweep)
    compared = compare_jobs(sweep, measured_by(sweep), is_over=shape["over"])
    shown = _standing_shape(compared) if compared else None
    return {**shape, "spec_toml": sweep.spec_toml, "refused": refused, "standing": shown}


def _standing_shape(standing: SweepStanding) -> dict[str, Any]:
    settings = [
        {
            "values": setting.values,
            "mean": setting.mean,
            "spread": setting.spread,
            "seeds": setting.seeds,
            "jobs": [job.job for job in setting.jobs],
        }
        for setting in standing.settings[:MAX_SETTINGS]
    ]
    best = sorted(standing.best_jobs)
    return {"metric": standing.metric, "text": standing.text, "best": best, "settings": settings}
