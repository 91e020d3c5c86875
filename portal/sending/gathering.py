"""Release held messages: one by itself, several as a digest. Floods are also sent as one; outdated messages never."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import Count, QuerySet

from portal.models import Delivery
from portal.outbox import kinds
from portal.outbox.filling import content_of
from vigil_core import formatting

HELD, WAITING, GATHERED = Delivery.State.HELD, Delivery.State.WAITING, Delivery.State.GATHERED
FLOOD = 5  # if more than this many wait for one channel, they are sent as one
MAX_NOTICES = 100  # notices in one digest; the rest are only counted


def release_held(now: datetime) -> None:
    """Release held messages that are due, and gather floods. Two concurrent workers make only one digest."""
    due = Delivery.objects.unsent().filter(due_at__lte=now)
    due.filter(content__isnull=True, notice__withdrawn_at__isnull=False).update(state=Delivery.State.DROPPED)
    for channel, many in _by_channel(due.filter(state=HELD)):
        rows = due.filter(state=HELD, channel=channel)
        if many == 1:
            rows.update(state=WAITING)
        else:
            _gather(channel, rows, now)
    fresh = due.filter(state=WAITING, content__isnull=True)
    for channel, many in _by_channel(fresh):
        if many > FLOOD:
            _gather(channel, fresh.filter(channel=channel), now)


def _by_channel(rows: QuerySet[Delivery]) -> list[tuple[int, int]]:
    return list(rows.order_by().values_list("channel").annotate(many=Count("pk")))


@transaction.atomic
def _gather(channel_id: int, rows: QuerySet[Delivery], now: datetime) -> None:
    # A concurrent worker waits here for the lock, and then finds nothing left.
    left = list(rows.select_for_update(of=("self",)).select_related("notice").order_by("pk"))
    if len(left) < 2:
        Delivery.objects.filter(pk__in=[row.pk for row in left]).update(state=WAITING)
        return
    notices = [content_of(row.notice) if row.notice else (row.content or {}) for row in left[:MAX_NOTICES]]
    title = f"{formatting.plural(len(left), 'notification')} since {formatting.minute(left[0].created_at)}"
    digest = Delivery.objects.create(
        channel_id=channel_id, key=f"digest:{left[0].pk}", kind=kinds.DIGEST, title=title, due_at=now,
        content=_content(title, notices, len(left) - len(notices), now),
    )  # fmt: skip
    Delivery.objects.filter(pk__in=[row.pk for row in left]).update(state=GATHERED, carried_by=digest)


def _content(title: str, notices: list[dict[str, Any]], more: int, now: datetime) -> dict[str, Any]:
    contents = [content for content in notices if content]
    return {
        "kind": kinds.DIGEST, "title": title, "key": "", "detail": "", "tone": "notice", "link": "", "facts": [],
        "raised_at": now.isoformat(), "notices": contents, "more": more + len(notices) - len(contents),
    }  # fmt: skip
