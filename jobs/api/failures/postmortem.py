"""REST: why a job's attempt failed, what it cost, and what people wrote about it."""

from __future__ import annotations

from datetime import date, datetime
from typing import Annotated, Any

from django.conf import settings
from django.db import transaction
from django.http import HttpResponse
from ninja import Query, Router, Schema
from pydantic import Field, StringConstraints

from diagnosis.causes import CAUSES
from jobs.api.request import NOT_YOURS, job_of
from jobs.gathering import postmortem as documents
from jobs.gathering import verdicts
from jobs.gathering.postmortem import Document
from jobs.models import FollowUp, Incident, Job
from jobs.postmortem import editing
from jobs.postmortem.editing import Action
from portal.http.api import ApiRequest, bad_field, one_of
from portal.http.openapi import deprecated, described
from portal.http.problems import Problem

router = Router(tags=["post-mortems"])
NONE_YET = "No such job that you can see, or no verdict: nothing failed, or only just now."

_PLAIN = r"^[^\x00]*$"
Narrative = Annotated[str, StringConstraints(max_length=editing.MAX_NARRATIVE, pattern=_PLAIN)]
Factor = Annotated[str, StringConstraints(min_length=1, max_length=editing.MAX_FACTOR, pattern=_PLAIN)]
ActionText = Annotated[str, StringConstraints(min_length=1, max_length=editing.MAX_ACTION, pattern=_PLAIN)]
Why = Annotated[str, StringConstraints(min_length=1, max_length=editing.MAX_WHY, pattern=_PLAIN)]
Username = Annotated[str, StringConstraints(max_length=150, pattern=_PLAIN)]


class EvidenceShape(Schema):
    file: str = Field(description="The log file, or the source if it is not a log.")
    line: int = Field(description="Line number as in `grep -n`; 0: not a log line.")
    text: str
    role: str = Field(description="root, confirmation, echo, survived, or context.")
    cause: str
    rank: int | None = None
    node: str = ""
    at: float | None = Field(None, description="Unix seconds, if known.")
    count: int = 1


class OtherShape(Schema):
    cause: str
    why: str


class PostMortemFigures(Schema):
    """The cost: work since the last checkpoint, plus allocated time until training resumed."""

    first_sign_at: datetime | None = Field(description="First sign of the failure.")
    bad_at: datetime | None = deprecated("first_sign_at")
    noticed_at: datetime = Field(description="End of the attempt.")
    resume_step: int = Field(description="Step of the checkpoint that was or could be resumed from; 0: the beginning.")
    kept_step: int = deprecated("resume_step")
    steps_lost: int | None
    lost_seconds: float
    gpu_hours: float | None = Field(description="Null: no GPUs were allocated.")
    money: float | None = Field(description="Null: the site has not set a price.")
    currency: str
    detect_seconds: float | None = Field(description="From the last step reported by rank 0 to the end.")
    resume_seconds: float | None = Field(description="From the end until the next attempt was training.")
    again_seconds: float | None = deprecated("resume_seconds")
    catch_up_seconds: float | None = Field(description="From the end until the last step was repeated.")


class PostMortemAct(Schema):
    at: datetime
    text: str


class PostMortemVersion(Schema):
    version: int
    made_at: datetime
    cause: str
    confidence: float


class OverruleShape(Schema):
    cause: str
    by: str
    at: datetime
    why: str


class FollowUpShape(Schema):
    id: int
    text: str
    owner: str = Field(description="User name; empty: nobody yet.")
    due: date | None
    done_at: datetime | None


class PostMortemShape(Schema):
    job: int
    attempt: int = Field(description="Its number.")
    at: datetime = Field(description="When it ended.")
    cause: str = Field(description="The cause named by a person, else by the evidence.")
    evidence_cause: str = Field(description="The cause by the evidence, overruled or not.")
    title: str = Field(description="The cause in plain words.")
    confidence: float = Field(description="Confidence in the evidence's cause, from 0 to 1.")
    owner: str = Field(description="Who must act: researcher, sysadmin, both, nobody.")
    source: str = Field(
        "",
        description="Source of the evidence's cause: machine, scheduler, launcher (from files in the job's own"
        " directory), program; empty: from an older release.",
    )
    doubts: list[str] = Field([], description="Reasons to doubt it, such as that the job had no GPU.")
    reported_by: str = Field(description="Who reported it, if a sysadmin must act; else empty.")
    is_confirmed: bool = Field(description="Confirmed by the machine or the scheduler, if a sysadmin must act.")
    summary: str = Field(description="What happened, in a sentence.")
    says: str = deprecated("summary")
    advice: str
    follows: str = Field(description="How the job continued, in a sentence.")
    evidence: list[EvidenceShape]
    runner_up: OtherShape | None
    ruled_out: list[OtherShape]
    unavailable: list[str] = Field(description="What could not be examined.")
    not_seen: list[str] = deprecated("unavailable")
    rank: int | None
    node: str
    exception: str
    frame: str = Field(description="Innermost frame of the user's code.")
    version: int
    is_final: bool = Field(description="No more evidence can arrive.")
    made_at: datetime
    versions: list[PostMortemVersion] = Field(description="Every verdict, oldest first.")
    next_attempt: int | None = Field(description="Number of the attempt that followed.")
    decision: str = Field(description="What Vigil decided, in a sentence.")
    actions_taken: list[PostMortemAct] = Field(description="What Vigil did, and the result.")
    did: list[PostMortemAct] = deprecated("actions_taken")
    figures: PostMortemFigures
    published_at: datetime | None = Field(description="Null: a draft.")
    overruled: OverruleShape | None
    narrative: str
    factors: list[str] = Field(description="What contributed to it.")
    actions: list[FollowUpShape]
    revision: int = Field(
        description="Revision of what people wrote; send it with a change to detect concurrent edits."
    )
    url: str


class VerdictQuery(Schema):
    attempt: int | None = Field(
        None, ge=1, le=2**31 - 1, description="Attempt number; default: the newest that failed."
    )


class FollowUpChange(Schema):
    """An action. With `id` it replaces that one; without, it is new."""

    model_config = {"extra": "forbid"}
    id: int | None = Field(None, ge=1, lt=2**63)
    text: ActionText
    owner: Username = Field("", description="A member of the project.")
    due: date | None = None
    is_done: bool = False


class OverruleChange(Schema):
    model_config = {"extra": "forbid"}
    cause: Annotated[str, one_of(list(CAUSES), "a cause")]
    why: Why


class PostMortemChanges(Schema):
    """The editable fields; omitted fields stay as they are. `overrule: null` withdraws an overrule."""

    model_config = {"extra": "forbid"}
    narrative: Narrative | None = None
    factors: list[Factor] | None = Field(None, max_length=editing.MAX_FACTORS)
    actions: list[FollowUpChange] | None = Field(
        None, max_length=editing.MAX_ACTIONS, description="The complete list: actions that are missing are deleted."
    )
    is_published: bool | None = None
    overrule: OverruleChange | None = None
    revision: int | None = Field(
        None, ge=0, lt=2**31, description="Revision that was read; 409 if it has changed since."
    )


@router.get(
    "/{int:job_id}/postmortem",
    response=PostMortemShape,
    summary="Why a job failed",
    openapi_extra=described(errors={404: NONE_YET}),
)
def postmortem(request: ApiRequest, job_id: int, query: Query[VerdictQuery]) -> dict[str, Any]:
    """Return the newest verdict on a failed attempt: one cause, its confidence, who must act, and the evidence.

    It includes the cost, what Vigil did, and what people wrote. The verdict is based on the logs of all ranks, the
    reports of scheduler and launcher, and node telemetry; it is made within seconds and revised while evidence arrives.
    """
    return _shape(_document(job_of(request, job_id), query.attempt))


@router.get(
    "/{int:job_id}/postmortem.md",
    summary="Why a job failed, as Markdown",
    openapi_extra=described(
        {
            "responses": {
                200: {"description": "The document.", "content": {"text/markdown": {"schema": {"type": "string"}}}}
            }
        },
        errors={404: NONE_YET},
    ),
)
def as_markdown(request: ApiRequest, job_id: int, query: Query[VerdictQuery]) -> HttpResponse:
    """Return the post-mortem for a ticket or a repository. Log text is safely fenced; HTML is escaped."""
    text = _document(job_of(request, job_id), query.attempt).as_markdown()
    return HttpResponse(text, content_type="text/markdown; charset=utf-8")


@router.patch(
    "/{int:job_id}/postmortem",
    response=PostMortemShape,
    summary="Edit, publish or overrule a post-mortem",
    openapi_extra=described(
        errors={403: NOT_YOURS, 404: NONE_YET, 409: "Somebody else has changed it since `revision`."}
    ),
)
def change(request: ApiRequest, job_id: int, query: Query[VerdictQuery], changes: PostMortemChanges) -> dict[str, Any]:
    """Edit the post-mortem. Its owner, the project's leads and sysadmins may. Omitted fields stay as they are."""
    document = _document(job_of(request, job_id, "change"), query.attempt)
    user, incident, given = request.auth, document.incident, changes.model_fields_set
    for name in given - {"overrule", "revision"}:
        if getattr(changes, name) is None:
            raise bad_field(name, "null is not allowed. Omit the field to keep its value.")
    with transaction.atomic():
        if given & {"narrative", "factors", "actions", "revision"}:
            editing.write(
                user,
                incident,
                narrative=changes.narrative,
                factors=changes.factors,
                actions=None if changes.actions is None else [Action(**action.dict()) for action in changes.actions],
                revision=changes.revision,
            )
        if changes.overrule is not None:
            editing.overrule(user, incident, cause=changes.overrule.cause, why=changes.overrule.why)
        elif "overrule" in given:
            editing.withdraw(user, incident)
        if changes.is_published is not None:
            editing.publish(user, incident, is_published=changes.is_published)
    return _shape(_document(document.job, document.attempt.number))


def _document(job: Job, number: int | None) -> Document:
    document = documents.load(job, number)
    if document is None or not document.verdict:
        which = f"Attempt {number} of it" if number is not None else "It"
        where = ""
        if (attempt := verdicts.restarted_in_place(job, number)) is not None:
            where = f" Attempt {attempt} restarted in place: its incidents are in GET /api/v1/postmortems."
        raise Problem(404, f"There is no verdict on #{job.pk}. {which} has not failed, or only just now.{where}")
    return document


def _shape(document: Document) -> dict[str, Any]:
    incident, verdict, written = document.incident, document.verdict, document.written
    head = document.headline
    acts = [{"at": act.at, "text": f"{act.text}{f', {act.more}' if act.more else ''}"} for act in document.acts]
    return {
        **verdict,
        "job": document.job.pk,
        "attempt": document.attempt.number,
        "at": incident.at,
        "cause": document.cause.code,
        "evidence_cause": document.machine_cause,
        "title": document.cause.title,
        "owner": document.cause.owner,
        "reported_by": document.reported_by,
        "is_confirmed": incident.is_confirmed,
        "summary": head.lead,
        "says": head.lead,
        "unavailable": verdict.get("not_seen", []),
        "advice": document.advice,
        "follows": head.rest,
        "version": incident.version,
        "is_final": incident.is_final,
        "made_at": document.versions[-1].made_at,
        "versions": [
            {
                "version": version.number,
                "made_at": version.made_at,
                "cause": version.cause,
                "confidence": version.confidence,
            }
            for version in document.versions
        ],
        "next_attempt": document.following.number if document.following else None,
        "decision": document.attempt.decision,
        "actions_taken": acts,
        "did": acts,
        "figures": _figures(document),
        "published_at": incident.published_at,
        "overruled": _overruled(incident),
        "narrative": written.narrative if written else "",
        "factors": written.factors if written else [],
        "actions": [_action(follow_up) for follow_up in document.follow_ups],
        "revision": written.revision if written else 0,
        "url": f"{settings.VIGIL_PUBLIC_URL}/jobs/{document.job.pk}/postmortem?attempt={document.attempt.number}",
    }


def _figures(document: Document) -> dict[str, Any]:
    cost, resume_point = document.cost, document.resume_point
    resume_step = resume_point.step if resume_point else 0
    return {
        "first_sign_at": document.bad_at,
        "bad_at": document.bad_at,
        "noticed_at": document.incident.at,
        "resume_step": resume_step,
        "kept_step": resume_step,
        "steps_lost": cost.steps,
        "lost_seconds": cost.lost_seconds,
        "gpu_hours": cost.gpu_hours,
        "money": cost.money,
        "currency": cost.currency if cost.money is not None else "",
        "detect_seconds": cost.detect_seconds,
        "resume_seconds": cost.resume_seconds,
        "again_seconds": cost.resume_seconds,
        "catch_up_seconds": cost.catch_up_seconds,
    }


def _overruled(incident: Incident) -> dict[str, Any] | None:
    """Return which cause a person named instead of the diagnosis, and why; None if nobody did."""
    if not incident.is_overruled:
        return None
    return {
        "cause": incident.overruled_cause,
        "by": incident.overruled_by.username if incident.overruled_by else "",
        "at": incident.overruled_at,
        "why": incident.overruled_why,
    }


def _action(follow_up: FollowUp) -> dict[str, Any]:
    owner = follow_up.owner.username if follow_up.owner else ""
    return {
        "id": follow_up.pk,
        "text": follow_up.text,
        "owner": owner,
        "due": follow_up.due,
        "done_at": follow_up.done_at,
    }
