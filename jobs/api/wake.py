"""POST /api/v1/scheduler/wake: notification from Slurm's hooks that something happened (docs/slurm/jobcomp.sh)."""

from __future__ import annotations

from django.http import HttpRequest
from ninja import Router, Schema, Status
from pydantic import Field

from jobs.following import wake
from portal.http.openapi import described
from portal.wakes import FOLLOWER

router = Router(tags=["scheduler"])


class Woken(Schema):
    woken: bool = Field(
        description="The poll starts at once. False: Redis is unavailable; the next poll is within two seconds."
    )


@router.post(
    "/wake",
    auth=None,
    throttle=[],
    response={202: Woken},
    summary="Poll the scheduler now",
    openapi_extra=described(
        {"security": [{"Bearer": []}]},
        errors={
            401: "The token does not match VIGIL_PUSH_SECRET.",
            404: "VIGIL_PUSH_SECRET is not set, so this endpoint is disabled.",
            429: "Too many wrong secrets within a minute.",
        },
    ),
)
def wake_follower(request: HttpRequest) -> Status[dict[str, bool]]:
    """Poll the scheduler now, for its hooks; the bearer token is VIGIL_PUSH_SECRET.

    Frequent calls are cheap: they are combined into one poll. The request's content is not read, so it cannot spread
    false information.
    """
    wake.admit(request.headers.get("Authorization", ""))
    return Status(202, {"woken": FOLLOWER.request()})
