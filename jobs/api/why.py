"""REST: why a job waits, and what would start now."""

from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Literal

from django.conf import settings
from ninja import Router, Schema
from pydantic import Field

from jobs.api.request import job_of
from jobs.why import pending
from jobs.why.variants import Variant, as_options
from portal.http.api import ApiRequest

router = Router(tags=["jobs"])


class BlockShape(Schema):
    kind: Literal[
        "limit", "nodes", "fragmentation", "priority", "dependency", "time", "reservation", "partition", "held"
    ]
    text: str
    name: str = Field(description='Of the limit, reservation or partition: "QOS small"; else the scheduler\'s word.')
    amount: str = Field(description="What the numbers count: gres/gpu, cpu, mem (MiB), nodes, jobs, seconds …")
    limit: int | None = Field(description="How much there may be, or is.")
    used: int | None
    asked: int | None
    is_said: bool = Field(description="It is what the scheduler's own word means.")
    is_final: bool = Field(description="Waiting will not help against it.")


class AheadShape(Schema):
    jobs: int
    gpus: int
    named: list[str] = Field(description="Those of them that you may see, five at most.")


class VariantShape(Schema):
    text: str
    changes: dict[str, Any] = Field(description="Of the spec, by dotted path.")
    set: list[str] = Field(description="The same as options of `vigil submit --set`.")
    starts_now: bool
    why: str
    url: str = Field(description="The form, filled in with it.")


class WhyShape(Schema):
    job: int
    state: str
    text: str = Field(description="In a sentence; of one that does not wait, since when it runs or why it ended.")
    said: str = Field(description="The scheduler's word as it is.")
    meaning: str = Field(description="In plain words.")
    starts_at: datetime | None = Field(description="The scheduler's own estimate.")
    never: bool = Field(description="As it is, it cannot start, however long it waits.")
    blocks: list[BlockShape]
    ahead: AheadShape
    variants: list[VariantShape] = Field(description="The same request otherwise, best first; five at most.")
    told_at: datetime | None = Field(description="As of when: the scheduler's last word on nodes and queue.")
    stale: str = Field(description="Why the scheduler has not been heard since, if so.")


@router.get("/{int:job_id}/why", response=WhyShape, summary="Why it waits, and what would start now")
def why(request: ApiRequest, job_id: int) -> dict[str, Any]:
    """Return why the job waits, from the scheduler's last report a few seconds ago; the scheduler itself is not
    queried.

    For a job that does not wait, the answer says so.
    """
    answer = pending.why(request.auth, job_of(request, job_id))
    found = answer.why
    return {
        "job": answer.job.pk,
        "state": answer.attempt.state,
        "text": answer.text,
        "said": found.said if found else "",
        "meaning": found.meaning if found else "",
        "starts_at": datetime.fromtimestamp(found.starts_at, UTC) if found and found.starts_at else None,
        "never": found.never if found else False,
        "blocks": [asdict(block) for block in found.blocks] if found else [],
        "ahead": asdict(found.ahead) if found else {"jobs": 0, "gpus": 0, "named": []},
        "variants": [_variant(answer.job.pk, variant) for variant in found.variants] if found else [],
        "told_at": answer.told_at,
        "stale": answer.stale,
    }


def _variant(job_id: int, variant: Variant) -> dict[str, Any]:
    url = f"{settings.VIGIL_PUBLIC_URL}{pending.form_url(job_id, variant)}"
    return {**asdict(variant), "set": as_options(variant.changes), "url": url}
