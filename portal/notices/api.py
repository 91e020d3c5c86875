"""REST endpoints for the signed-in person's notifications."""

from datetime import datetime
from typing import Any, Literal

from ninja import Query, Router, Schema
from pydantic import Field

from portal import notify
from portal.http.api import ApiRequest, PageQuery
from portal.http.openapi import described
from portal.http.paging import SortOrder, page
from portal.http.problems import Problem
from portal.models import Notice

router = Router(tags=["people"])
NEWEST = SortOrder("raised_at", descending=True)


class NoticeShape(Schema):
    """A notification, active as long as its reason lasts."""

    id: int
    kind: str = Field(description="A short word for programs, such as gpu.idle.")
    tone: Literal["notice", "warn"]
    audience: Literal["person", "sysadmins"] = Field(description="Who receives it: you, or all sysadmins.")
    title: str = Field(description="A sentence.")
    detail: str
    link: str = Field(description="A path of this site; empty: no link.")
    raised_at: datetime = Field(description="When it was raised.")
    last_raised_at: datetime = Field(description="When it was last confirmed.")
    withdrawn_at: datetime | None
    read_at: datetime | None = Field(description="When you marked it as read.")


class Notices(Schema):
    items: list[NoticeShape]
    next: str | None = None


class NoticeQuery(PageQuery):
    unread: bool = Field(False, description="Only unread ones.")


@router.get("", response=Notices, summary="Your notifications, newest first")
def notices(request: ApiRequest, query: Query[NoticeQuery]) -> dict[str, Any]:
    """List active notifications: your own and, for sysadmins, those to all sysadmins."""
    user = request.auth
    rows = Notice.objects.visible_to(user).active().with_read_at(user)
    found = page(rows.unread_by(user) if query.unread else rows, NEWEST, cursor=query.cursor, limit=query.limit)
    return {"items": found.items, "next": found.next}


@router.post(
    "/{int:notice_id}/read",
    response=NoticeShape,
    summary="Mark a notice as read",
    openapi_extra=described(errors={404: "You have no such notice."}),
)
def read(request: ApiRequest, notice_id: int) -> Notice:
    """Mark a notification as read, for you alone. Repeating is harmless. If raised again, it is unread."""
    visible = Notice.objects.visible_to(request.auth).filter(pk=notice_id)
    notice = visible.first()
    if notice is None:
        raise Problem(404, f"You have no notice {notice_id}.")
    notify.mark_read(notice, request.auth)
    return visible.with_read_at(request.auth).get()
