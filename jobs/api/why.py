"""REST: why a job waits, and what would start now."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Literal

from django.conf import settings
from ninja import Router, Schema
from pydantic import Field

from jobs.api.request import job_of
from jobs.why import pending
from jobs.why.blocks import Block
from jobs.why.variants import Variant, as_options
from portal.http.api import ApiRequest

router = Router(tags=["jobs"])


class BlockShape(Schema):
    kind: Literal[
        "limit", "nodes", "fragmentation", "priority", "dependency", "time", "reservation", "partition", "held"
    ]
    text: str
    name: str = Field(
        description='Name of the limit, reservation or partition: "QOS small"; else the scheduler\'s reason.'
    )
    amount: str = Field(description="What the numbers count: gres/gpu, cpu, mem (MiB), nodes, jobs, seconds …")
    limit: int | None = Field(description="The limit, or what is available.")
    used: int | None
    asked: int | None
    is_said: bool = Field(description="Whether the scheduler's own reason means this.")
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


class WhyShape(Schema):
    job: int
    state: str
    text: str = Field(
        description="Summary in a sentence; for a job that does not wait, since when it runs or why it ended."
    )
    said: str = Field(description="The scheduler's reason, unchanged.")
    meaning: str = Field(description="The reason, explained.")
    starts_at: datetime | None = Field(description="The scheduler's own estimate.")
    never: bool = Field(description="The job can never start as requested.")
    blocks: list[BlockShape]
    ahead: AheadShape
    variants: list[VariantShape] = Field(
        description="Variants of the request that would start sooner, best first; at most five."
    )
    told_at: datetime | None = Field(description="Time of the scheduler's last report on nodes and queue.")
    stale: str = Field(description="Why there has been no report since, if so.")


@router.get("/{int:job_id}/why", response=WhyShape, summary="Why it waits, and what would start now")
def why(request: ApiRequest, job_id: int) -> dict[str, Any]:
    """Return why the job waits, from the scheduler's last report a few seconds ago.

    The scheduler itself is not queried.

    For a job that does not wait, the answer says so.
    """
    answer = pending.why(request.auth, job_of(request, job_id))
    found = answer.why
    return {
        "job": answer.job.pk,
        "state": answer.attempt.state,
        "text": answer.text,
        "said": found.reason if found else "",
        "meaning": found.meaning if found else "",
        "starts_at": datetime.fromtimestamp(found.starts_at, UTC) if found and found.starts_at else None,
        "never": found.never if found else False,
        "blocks": [_block(block) for block in found.blocks] if found else [],
        "ahead": asdict(found.ahead) if found else {"jobs": 0, "gpus": 0, "named": []},
        "variants": [_variant(answer.job.pk, variant) for variant in found.variants] if found else [],
        "told_at": answer.read_at,
        "stale": answer.stale,
    }


def _block(block: Block) -> dict[str, Any]:
    fields = asdict(block)
    return {"asked": fields.pop("requested"), "is_said": fields.pop("is_reason"), **fields}


def _variant(job_id: int, variant: Variant) -> dict[str, Any]:
    url = f"{settings.VIGIL_PUBLIC_URL}{pending.form_url(job_id, variant)}"
    return {**asdict(variant), "set": as_options(variant.changes), "url": url}
