"""REST endpoints for the outbox: list, resend and give up messages."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from ninja import Query, Router, Schema
from pydantic import Field

from portal.http.api import ApiRequest, PageQuery, shaped_page
from portal.http.openapi import described
from portal.http.paging import SortOrder
from portal.http.problems import Problem
from portal.models import Delivery
from portal.notices import channels

router = Router(tags=["people"])
NEWEST = SortOrder("id", descending=True)
State = Literal["held", "waiting", "sent", "gathered", "dropped", "given_up"]
UNKNOWN = {404: "No such message, or not visible to you."}


class DeliveryShape(Schema):
    """A message to a channel. Of the channel's address only an e-mail address or the host is shown."""

    id: int
    uid: str = Field(description="What receivers see as webhook-id and Idempotency-Key, the same at each try.")
    kind: str = Field(description="Kind of the notification; digest: several together; test.")
    title: str
    channel: int
    channel_kind: Literal["email", "slack", "webhook"]
    where: str
    person: str | None
    project: str | None
    state: State = Field(description="gathered: sent in a digest. dropped: it no longer applied.")
    due_at: datetime = Field(description="When it is tried next, if it is held or waiting.")
    tries: int
    error: str = Field(description="Result of the last try.")
    created_at: datetime
    sent_at: datetime | None
    carried_by: int | None = Field(description="The digest in which it was sent.")


class Deliveries(Schema):
    items: list[DeliveryShape]
    next: str | None = None


class DeliveryQuery(PageQuery):
    state: Annotated[State | None, Field(None)]


@router.get("", response=Deliveries, summary="Messages to external channels, newest first")
def outbox(request: ApiRequest, query: Query[DeliveryQuery]) -> dict[str, Any]:
    """List messages, sent or not, to your channels and those of projects that you lead; sysadmins see all.

    Rows are deleted after 30 days.
    """
    rows = Delivery.objects.visible_to(request.auth).select_related("channel__user", "channel__project")
    return shaped_page(rows.filter(state=query.state) if query.state else rows, NEWEST, query, _shape)


@router.post(
    "/{int:delivery_id}/resend",
    response=DeliveryShape,
    summary="Send a message again",
    openapi_extra=described(
        errors={**UNKNOWN, 409: "It was sent in a digest, no longer applies, or is for a paused channel."}
    ),
)
def resend(request: ApiRequest, delivery_id: int) -> dict[str, Any]:
    """Send a message again within seconds, as if for the first time, with the same id."""
    delivery = _delivery(request, delivery_id)
    try:
        channels.resend(delivery)
    except channels.NotSent as error:
        raise Problem(409, str(error)) from error
    return _shape(_delivery(request, delivery_id))


@router.post(
    "/{int:delivery_id}/give-up",
    response=DeliveryShape,
    summary="Stop trying to send a message",
    openapi_extra=described(errors={**UNKNOWN, 409: "It is no longer waiting."}),
)
def give_up(request: ApiRequest, delivery_id: int) -> dict[str, Any]:
    """Give up on a message: it is not retried, unless somebody resends it."""
    delivery = _delivery(request, delivery_id)
    if not channels.give_up(delivery, request.auth.username):
        raise Problem(409, f"Message {delivery_id} is {delivery.get_state_display()}, so it is not waiting.")
    return _shape(_delivery(request, delivery_id))


def _delivery(request: ApiRequest, delivery_id: int) -> Delivery:
    rows = Delivery.objects.visible_to(request.auth).select_related("channel__user", "channel__project")
    found = rows.filter(pk=delivery_id).first()
    if found is None:
        raise Problem(404, f"No message {delivery_id}.")
    return found


def _shape(delivery: Delivery) -> dict[str, Any]:
    names = ("id", "kind", "title", "state", "due_at", "tries", "error", "created_at", "sent_at")
    channel = delivery.channel
    return {
        **{name: getattr(delivery, name) for name in names},
        "uid": str(delivery.uid),
        "channel": channel.pk,
        "channel_kind": channel.kind,
        "where": channel.where,
        "person": channel.user.username if channel.user else None,
        "project": channel.project.slug if channel.project else None,
        "carried_by": delivery.carried_by_id,
    }
