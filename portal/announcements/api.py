"""REST: announcements to everybody."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal

from ninja import Query, Router, Schema, Status
from pydantic import Field

from portal.announcements import write
from portal.http.api import ApiRequest, Moment, PageQuery, bad_field, shaped_page
from portal.http.openapi import described
from portal.http.paging import SortOrder
from portal.http.problems import Problem
from portal.models import Announcement
from portal.sysadmins import FORBIDDEN, only_sysadmins

router = Router(tags=["people"])
Level = Literal["info", "warning", "critical"]


class AnnouncementShape(Schema):
    """A short plain text for everybody."""

    id: int
    text: str
    level: Level
    starts_at: datetime
    ends_at: datetime | None = Field(description="Null: until it is withdrawn.")
    written_by: str | None
    withdrawn_at: datetime | None
    is_shown: bool = Field(description="Whether it is shown now.")


class Announcements(Schema):
    items: list[AnnouncementShape]
    next: str | None = None


class AnnouncementQuery(PageQuery):
    all: bool = Field(False, description="Also those that are over; for sysadmins also planned and withdrawn ones.")


class NewAnnouncement(Schema):
    model_config = {"extra": "forbid"}
    text: str = Field(min_length=1, max_length=Announcement.MAX_LENGTH, description="Plain text, one paragraph.")
    level: Level = Field("info", description="How urgent it is.")
    starts_at: Moment | None = Field(None, description="Default: now.")
    ends_at: Moment | None = Field(None, description="Default: until it is withdrawn.")


@router.get("", response=Announcements, summary="Announcements, newest first")
def announcements(request: ApiRequest, query: Query[AnnouncementQuery]) -> dict[str, Any]:
    """List current announcements, or with `all` also past ones and, for sysadmins, planned and withdrawn ones."""
    rows = Announcement.objects.visible_to(request.auth) if query.all else Announcement.objects.shown()
    return shaped_page(rows.select_related("written_by"), SortOrder("id", descending=True), query, _shape)


@router.post(
    "",
    response={201: AnnouncementShape},
    summary="Announce something to everybody (sysadmins)",
    openapi_extra=described(errors=FORBIDDEN | {422: "The text, the level or the times are wrong."}),
)
def announce(request: ApiRequest, body: NewAnnouncement) -> Status[dict[str, Any]]:
    """Show a text on the home page, on the submit page and to users of `vigil`, from one time to another."""
    only_sysadmins(request, "post announcements")
    try:
        row = write.announce(request.auth, body.text, body.level, body.starts_at, body.ends_at)
    except write.BadAnnouncement as error:
        raise bad_field(error.field, str(error)) from None
    return Status(201, _shape(row))


@router.post(
    "/{int:announcement_id}/withdraw",
    response=AnnouncementShape,
    summary="Withdraw an announcement (sysadmins)",
    openapi_extra=described(errors=FORBIDDEN | {404: "No such announcement.", 409: "It is over already."}),
)
def withdraw(request: ApiRequest, announcement_id: int) -> dict[str, Any]:
    """Withdraw an announcement before its end."""
    only_sysadmins(request, "withdraw announcements")
    rows = Announcement.objects.select_related("written_by")
    row = rows.filter(pk=announcement_id).first()
    if row is None:
        raise Problem(404, f"There is no announcement {announcement_id}.")
    if not write.withdraw(request.auth, row):
        raise Problem(409, f"Announcement {announcement_id} is over already.")
    row.refresh_from_db()
    return _shape(row)


def _shape(row: Announcement) -> dict[str, Any]:
    same = ("id", "text", "level", "starts_at", "ends_at", "withdrawn_at", "is_shown")
    return {name: getattr(row, name) for name in same} | {
        "written_by": row.written_by.username if row.written_by else None
    }
