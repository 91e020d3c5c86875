"""REST: jobs."""

from typing import Annotated, Any

from django.http import HttpResponse
from ninja import Query, Router, Schema, Status
from pydantic import Field, StringConstraints

from jobs.api.request import (
    BODY,
    KEY_HEADER,
    NOT_YOURS,
    SUBMISSION,
    TYPES,
    SweepRequest,
    job_of,
    job_or_sweep_request,
    job_request,
    key_of,
)
from jobs.api.shapes import (
    Attempts,
    AttemptShape,
    CheckShape,
    Events,
    JobDetail,
    Jobs,
    JobShape,
    SpecShape,
    attempt_detail,
    attempt_shape,
    event_shape,
    job_detail,
    job_shape,
)
from jobs.listing.criteria import DEFAULT_SORT, STATE_WORDS
from jobs.listing.jobs import SORTS, JobSearch
from jobs.models import Attempt, Event, Job
from jobs.spec import JobSpec, write_toml
from jobs.submitting import clone
from jobs.submitting import release as releasing
from jobs.submitting import submit as lifecycle
from jobs.submitting.dryrun import dry_run, sweep_run
from portal.http.api import (
    ApiRequest,
    Cursor,
    Limit,
    Moment,
    PageQuery,
    Text,
    bad_field,
    json_response,
    one_of,
    shaped_page,
)
from portal.http.openapi import described
from portal.http.paging import SortOrder
from portal.http.problems import Problem

router = Router(tags=["jobs"])
spec_router = Router(tags=["jobs"])
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
TagName = Annotated[str, StringConstraints(pattern=r"^[\w.:/+-]{1,64}$")]
LongText = Annotated[str, StringConstraints(max_length=20_000, pattern=r"^[^\x00]*$")]


class JobListQuery(Schema):
    """Filters of the list; repeat `state`, `project` and `tag` for several."""

    q: Text = Field("", description="Words that must all match: part of the name, or a number, tag, project or person.")
    state: Annotated[list[str], one_of(STATE_WORDS, "a state")] = Field(
        [], description=f"Any of {', '.join(STATE_WORDS)}."
    )
    project: list[Text] = []
    owner: Text = ""
    kind: Text = ""
    tag: list[Text] = Field([], description="All of these tags.")
    created_after: Moment | None = None
    created_before: Moment | None = None
    parent: int | None = Field(None, ge=1, lt=2**63)
    sweep: int | None = Field(None, ge=1, lt=2**63, description="Jobs of this sweep.")
    sort: Annotated[str, one_of(SORTS, "an order")] = Field(
        DEFAULT_SORT, description=f"One of {', '.join(SORTS)}.", json_schema_extra={"enum": list(SORTS)}
    )
    limit: Limit
    cursor: Cursor

    def search(self) -> JobSearch:
        return JobSearch(
            text=self.q,
            states=self.state,
            projects=self.project,
            owner=self.owner,
            kind=self.kind,
            tags=self.tag,
            created_after=self.created_after,
            created_before=self.created_before,
            parent=self.parent,
            sweep=self.sweep,
            sort=self.sort,
        )


class EventQuery(PageQuery):
    kind: Text = ""
    attempt: int | None = Field(None, ge=1, lt=2**31, description="An attempt's number.")


class SpecQuery(Schema):
    pinned: bool = Field(False, description="For a script from git: replace its ref by the commit that was fetched.")


class Changes(Schema):
    """The editable fields of a job; omitted fields stay as they are."""

    model_config = {"extra": "forbid"}
    name: Name | None = None
    tags: list[TagName] | None = Field(None, max_length=50)
    notes: LongText | None = None


class Resumption(Schema):
    """The checkpoint that a job resumes from, and how far it runs.

    Without `step` it resumes from the newest checkpoint on the last attempt's parent chain.
    """

    model_config = {"extra": "forbid", "strict": True}
    step: int | None = Field(default=None, ge=0, lt=2**63, description="Step of a committed checkpoint.")
    steps: int | None = Field(
        default=None, ge=1, lt=2**63, description="Run up to this many steps instead (rounds in a federated job)."
    )


@router.get("", response=Jobs, summary="Jobs you can see")
def jobs(request: ApiRequest, query: Query[JobListQuery]) -> HttpResponse:
    """Return a page of jobs, newest first unless `sort` says otherwise.

    Pass `next` as `cursor` to get the next page.
    """
    found = query.search().page(request.auth, cursor=query.cursor, limit=query.limit, without=("spec",))
    return json_response({"items": [job_shape(job) for job in found.items], "next": found.next})


@router.post(
    "",
    response={200: JobShape, 201: JobShape},
    summary="Submit a job",
    openapi_extra=described(SUBMISSION),
)
def submit(request: ApiRequest, response: HttpResponse) -> Status[dict[str, Any]]:
    """Submit a spec as JSON, as TOML text, or as a form with a code archive.

    The response is sent once the job is stored; it reaches the scheduler within seconds. 200 means that the same
    Idempotency-Key and body were sent before, and returns that job.
    """
    key = key_of(request)
    body = job_request(request)
    parent = None if body.parent is None else _parent(request, body.parent)
    job, created = lifecycle.submit(
        request.auth, body.spec, spec_toml=body.spec_toml, key=key, parent=parent, code=body.code
    )
    response.headers["Location"] = f"/api/v1/jobs/{job.pk}"
    return Status(201 if created else 200, job_shape(job_of(request, job.pk)))


@router.post(
    "/check",
    response=CheckShape,
    summary="Check a spec without submitting it",
    openapi_extra=described(BODY, errors={415: TYPES}),
)
def check(request: ApiRequest) -> dict[str, Any]:
    """Return what prevents a specification from being submitted, and what it would do.

    For a specification with [sweep], the answer is for its first job, as all jobs request the same resources.
    """
    body = job_or_sweep_request(request)
    if isinstance(body, SweepRequest):
        spec, findings = body.spec.first, sweep_run(request.auth, body.spec)
    else:
        spec, findings = body.spec, dry_run(request.auth, body.spec)
    return {
        "spec": spec.model_dump(mode="json"),
        "spec_toml": write_toml(spec, defaults=True),
        "findings": [{"level": f.level, "title": f.title, "text": f.text} for f in findings],
        "split": next((f.split.as_dict() for f in findings if f.split is not None), None),
    }


@router.get("/{int:job_id}", response=JobDetail, summary="One job")
def job(request: ApiRequest, job_id: int) -> dict[str, Any]:
    """Return everything about a job: its spec, latest attempt, progress and newest values."""
    return job_detail(job_of(request, job_id))


@router.patch(
    "/{int:job_id}",
    response=JobDetail,
    summary="Change a job's name, tags or notes",
    openapi_extra=described(
        errors={
            403: NOT_YOURS,
            409: "The job has just been deleted.",
        }
    ),
)
def change(request: ApiRequest, job_id: int, changes: Changes) -> dict[str, Any]:
    """Change a job. Omitted fields stay as they are."""
    found = job_of(request, job_id, "change")
    given = changes.model_dump(exclude_unset=True)
    for name, value in given.items():
        if value is None:
            raise bad_field(name, "null is not allowed. Omit the field to keep its value.")
    lifecycle.change(request.auth, found, **given)
    return job_detail(job_of(request, job_id))


@router.delete(
    "/{int:job_id}",
    response={204: None},
    summary="Delete an ended job with all its data",
    openapi_extra=described(
        errors={
            403: NOT_YOURS,
            409: "The job has not ended (cancel it first), or its run directory's file system is unavailable.",
        }
    ),
)
def delete(request: ApiRequest, job_id: int) -> Status[None]:
    """Delete a job and its run directory, including logs and checkpoints. This cannot be undone."""
    found = job_of(request, job_id, "change", doing="deleted")
    lifecycle.delete(request.auth, found)
    return Status(204, None)


@router.post(
    "/{int:job_id}/cancel",
    response={202: JobShape},
    summary="Cancel a job, saving a last checkpoint",
    openapi_extra=described(
        errors={
            403: NOT_YOURS,
            409: "It has already ended.",
        }
    ),
)
def cancel(request: ApiRequest, job_id: int) -> Status[dict[str, Any]]:
    """Cancel a job: its ranks save a last checkpoint and stop. `state` follows within seconds.

    Sending it again 10 s or more after the first time kills the job as `/kill` does.
    """
    found = job_of(request, job_id, "change", doing="cancelled")
    lifecycle.cancel(request.auth, found)
    return Status(202, job_shape(job_of(request, job_id)))


@router.post(
    "/{int:job_id}/release",
    response={202: JobShape},
    summary="Release a job that is held in the scheduler",
    openapi_extra=described(
        errors={
            403: NOT_YOURS,
            409: "The job is not held.",
        }
    ),
)
def release(request: ApiRequest, job_id: int) -> Status[dict[str, Any]]:
    """Release a held job within seconds, as `scontrol release` does.

    If that fails, the attempt's `release_outcome` says why.
    """
    found = job_of(request, job_id, "change", doing="released")
    releasing.release(request.auth, found)
    return Status(202, job_shape(job_of(request, job_id)))


@router.post(
    "/{int:job_id}/kill",
    response={202: JobShape},
    summary="Kill a job at once, without a last checkpoint",
    openapi_extra=described(
        errors={
            403: NOT_YOURS,
            409: "It has already ended.",
        }
    ),
)
def kill(request: ApiRequest, job_id: int) -> Status[dict[str, Any]]:
    """Kill a job that does not stop when cancelled. Work since its newest checkpoint is lost. Kills are audited."""
    found = job_of(request, job_id, "kill", doing="killed")
    lifecycle.kill(request.auth, found)
    return Status(202, job_shape(job_of(request, job_id)))


@router.post(
    "/{int:job_id}/resume",
    response={201: AttemptShape},
    summary="Resume a job that has ended",
    openapi_extra=described(
        KEY_HEADER,
        errors={
            403: NOT_YOURS,
            409: "The job has not ended, or has no checkpoint to resume from.",
        },
    ),
)
def resume(request: ApiRequest, job_id: int, body: Resumption | None = None) -> Status[dict[str, Any]]:
    """Start a new attempt of the job, from the newest checkpoint or from `step`."""
    found = job_of(request, job_id, "change", doing="resumed")
    body = body or Resumption()
    attempt = lifecycle.resume(request.auth, found, step=body.step, steps=body.steps, key=key_of(request))
    return Status(201, attempt_shape(attempt))


@router.get(
    "/{int:job_id}/spec",
    response=SpecShape,
    summary="The job's spec",
    openapi_extra=described(errors={409: "`pinned`: the code has not been fetched yet, or is not from a repository."}),
)
def spec(request: ApiRequest, job_id: int, query: Query[SpecQuery]) -> dict[str, Any]:
    """Return the spec as it was written, with comments, and as JSON with every default."""
    found = job_of(request, job_id)
    if not query.pinned:
        return {"spec": found.spec, "spec_toml": found.spec_toml, "parent": found.parent_id}
    text = clone.pinned_toml(found)
    return {"spec": JobSpec.parse_toml(text).model_dump(mode="json"), "spec_toml": text, "parent": found.parent_id}


@router.get("/{int:job_id}/attempts", response=Attempts, summary="A job's attempts, oldest first")
def attempts(request: ApiRequest, job_id: int, query: Query[PageQuery]) -> dict[str, Any]:
    """Return the job's attempts. Each submission to the scheduler is one; restarts in place belong to their attempt."""
    found = Attempt.objects.filter(job=job_of(request, job_id)).select_related("resume_from")
    return shaped_page(found, SortOrder("number"), query, attempt_detail)


@router.get("/{int:job_id}/events", response=Events, summary="A job's events, in order of arrival")
def events(request: ApiRequest, job_id: int, query: Query[EventQuery]) -> dict[str, Any]:
    """Return phases, checkpoints, warnings and restarts, as reported by ranks, launchers and Vigil."""
    found = Event.objects.filter(attempt__job=job_of(request, job_id)).select_related("attempt")
    if query.kind:
        found = found.filter(kind=query.kind)
    if query.attempt is not None:
        found = found.filter(attempt__number=query.attempt)
    return shaped_page(found, SortOrder("id"), query, event_shape)


@spec_router.get("/schema", response=dict[str, Any], summary="JSON Schema of a job's spec")
def spec_schema(request: ApiRequest) -> dict[str, Any]:
    """Return the JSON Schema of a spec, with the meaning of each field, for editors and generators."""
    return JobSpec.model_json_schema()


def _parent(request: ApiRequest, job_id: int) -> Job:
    try:
        return job_of(request, job_id)
    except Problem as error:
        raise bad_field("parent", error.detail) from error
