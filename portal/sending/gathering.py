"""Held messages let go: one by itself, several as one. So do many that came at once."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db import transaction
from django.db.models import Count, QuerySet

from portal import formatting
from portal.models import Channel, Delivery
from portal.outbox import kinds
from portal.outbox.filling import content_of

HELD, WAITING, GATHERED = Delivery.State.HELD, Delivery.State.WAITING, Delivery.State.GATHERED
FLOOD = 5  # more than so many that wait for one channel go as one
MOST = 100  # notices in one digest; the rest is counted


def let_go(now: datetime) -> None:
    """Whatever is due of what was held, and floods. Two workers at once make one digest: its key is unique."""
    for channel, many in _by_channel(Delivery.objects.filter(state=HELD, due_at__lte=now)):
        rows = Delivery.objects.filter(state=HELD, due_at__lte=now, channel=channel)
        if many == 1:
            rows.update(state=WAITING)
        else:
            _gather(channel, rows, now)
    fresh = Delivery.objects.filter(state=WAITING, due_at__lte=now, tries=0).exclude(
        kind__in=[kinds.DIGEST, kinds.TEST]
    )
    for channel, many in _by_channel(fresh):
        if many > FLOOD:
            _gather(channel, fresh.filter(channel=channel), now)


def _by_channel(rows: QuerySet[Delivery]) -> list[tuple[int, int]]:
    return list(rows.order_by().values_list("channel").annotate(many=Count("pk")))


@transaction.atomic
def _gather(channel_id: int, rows: QuerySet[Delivery], now: datetime) -> None:
    Channel.objects.select_for_update().get(pk=channel_id)  # another worker waits here, and finds nothing then
    found = list(rows.select_related("notice").order_by("pk"))
    gone = [row.pk for row in found if row.notice and row.notice.withdrawn_at]
    Delivery.objects.filter(pk__in=gone).update(state=Delivery.State.DROPPED)
    left = [row for row in found if row.pk not in set(gone)]
    if len(left) < 2:
        Delivery.objects.filter(pk__in=[row.pk for row in left]).update(state=WAITING)
        return
    notices = [content_of(row.notice) if row.notice else (row.content or {}) for row in left[:MOST]]
    title = f"{formatting.plural(len(left), 'notice')} since {formatting.clock(left[0].created_at, now)}"
    digest = Delivery.objects.create(
        channel_id=channel_id, key=f"digest:{left[0].pk}", kind=kinds.DIGEST, title=title, due_at=now,
        content=_content(title, notices, len(left) - len(notices), now),
    )  # fmt: skip
    Delivery.objects.filter(pk__in=[row.pk for row in left]).update(state=GATHERED, carried_by=digest)


def _content(title: str, notices: list[dict[str, Any]], more: int, now: datetime) -> dict[str, Any]:
    said = [one for one in notices if one]
    return {
        "kind": kinds.DIGEST, "title": title, "key": "", "detail": "", "tone": "notice", "link": "", "facts": [],
        "raised_at": now.isoformat(), "notices": said, "more": more + len(notices) - len(said),
    }  # fmt: skip
