"""REST: why a job waits, and what would start now."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from django.conf import settings
from ninja import Router, Schema
from pydantic import Field

from jobs.api.request import job_of
from jobs.waiting import pending
from jobs.waiting.block import Block, BlockKind, MaintenanceEffect
from jobs.waiting.variants import Variant, as_options
from portal.http.api import ApiRequest
from portal.http.openapi import deprecated, with_former_names

router = Router(tags=["jobs"])


class BlockShape(Schema):
    kind: BlockKind
    text: str
    name: str = Field(
        description='Name of the limit, reservation or partition: "QOS small"; else the scheduler\'s reason.'
    )
    amount: str = Field(description="What the numbers count: gres/gpu, cpu, mem (MiB), nodes, jobs, seconds …")
    limit: int | None = Field(description="The limit, or what is available.")
    used: int | None
    requested: int | None
    is_scheduler_reason: bool = Field(description="Whether the scheduler's own reason means this.")
    asked: int | None = deprecated("requested")
    is_said: bool = deprecated("is_scheduler_reason")
    is_final: bool = Field(description="Waiting will not help.")


class AheadShape(Schema):
    jobs: int
    gpus: int
    named: list[str] = Field(description="Jobs that you may see, at most five.")


class VariantShape(Schema):
    text: str
    changes: dict[str, Any] = Field(description="Changes to the spec, by dotted path.")
    set: list[str] = Field(description="The same as options of `vigil submit --set`.")
    starts_now: bool
    why: str
    url: str = Field(description="The form with these changes.")


class AvoidedShape(Schema):
    """Describes a node that the attempt was submitted without."""

    node: str
    reason: str


class JobMaintenanceShape(Schema):
    """A maintenance window that keeps the job from nodes, or will unless it has started by then."""

    reason: str
    nodes: list[str] = Field(description="Those of its nodes that the job could use.")
    starts_at: datetime
    ends_at: datetime
    is_blocking: bool = Field(description="The job does not start on these nodes before it ends.")
    text: str


class WhyShape(Schema):
    job: int
    state: str
    text: str = Field(
        description="Summary in a sentence; for a job that does not wait, since when it runs or why it ended."
    )
    scheduler_reason: str = Field(description="The scheduler's reason, unchanged.")
    said: str = deprecated("scheduler_reason")
    meaning: str = Field(description="The reason, explained.")
    starts_at: datetime | None = Field(description="The scheduler's own estimate.")
    can_never_start: bool = Field(description="The job can never start as requested.")
    never: bool = deprecated("can_never_start")
    blocks: list[BlockShape]
    ahead: AheadShape
    variants: list[VariantShape] = Field(
        description="Variants of the request that would start sooner, best first; at most five."
    )
    avoids: list[AvoidedShape] = Field(
        description="Nodes that it was submitted without: an attempt failed there, or a health rule excludes them."
    )
    maintenance: list[JobMaintenanceShape]
    reported_at: datetime | None = Field(description="Time of the scheduler's last report on nodes and queue.")
    told_at: datetime | None = deprecated("reported_at")
    stale: str = Field(description="Why there has been no report since, if so.")


@router.get("/{int:job_id}/why", response=WhyShape, summary="Why it waits, and what would start now")
def why(request: ApiRequest, job_id: int) -> dict[str, Any]:
    """Return why the job waits, from the scheduler's last report a few seconds ago, without querying the scheduler.

    For a job that does not wait, the answer says so.
    """
    answer = pending.why(request.auth, job_of(request, job_id))
    explanation = answer.why
    starts_at = explanation.starts_at if explanation else None
    shown = {
        "job": answer.job.pk,
        "state": answer.attempt.state,
        "text": answer.text,
        "scheduler_reason": explanation.reason if explanation else "",
        "meaning": explanation.meaning if explanation else "",
        "starts_at": datetime.fromtimestamp(starts_at, UTC) if starts_at else None,
        "can_never_start": explanation.never if explanation else False,
        "blocks": [_block(block) for block in explanation.blocks] if explanation else [],
        "ahead": asdict(explanation.ahead) if explanation else {"jobs": 0, "gpus": 0, "named": []},
        "variants": [_variant(answer.job.pk, variant) for variant in explanation.variants] if explanation else [],
        "avoids": [{"node": node, "reason": reason} for node, reason in answer.avoids.items()],
        "maintenance": [_maintenance(effect) for effect in explanation.maintenance] if explanation else [],
        "reported_at": answer.read_at,
        "stale": answer.stale,
    }
    return with_former_names(shown, said="scheduler_reason", never="can_never_start", told_at="reported_at")


def _block(block: Block) -> dict[str, Any]:
    fields = asdict(block)
    fields["is_scheduler_reason"] = fields.pop("is_reason")
    return with_former_names(fields, asked="requested", is_said="is_scheduler_reason")


def _maintenance(effect: MaintenanceEffect) -> dict[str, Any]:
    window = effect.window
    return {
        "reason": window.reason, "nodes": list(effect.nodes), "is_blocking": effect.is_blocking, "text": effect.text,
        "starts_at": datetime.fromtimestamp(window.starts_at, UTC),
        "ends_at": datetime.fromtimestamp(window.ends_at, UTC),
    }  # fmt: skip


def _variant(job_id: int, variant: Variant) -> dict[str, Any]:
    url = f"{settings.VIGIL_PUBLIC_URL}{pending.form_url(job_id, variant)}"
    return {**asdict(variant), "set": as_options(variant.changes), "url": url}
