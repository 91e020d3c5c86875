"""Put a notice into the outbox: one row per channel that wants it, in the transaction that raises it."""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db.models import Q, QuerySet
from django.utils import timezone

from portal.models import Channel, Delivery, Notice, Project
from portal.outbox import kinds
from portal.outbox.hours import DeliveryHours
from vigil_core import formatting

HELD, WAITING, DROPPED = Delivery.State.HELD, Delivery.State.WAITING, Delivery.State.DROPPED


def fill(notice: Notice, *, project: Project | None = None, settle: timedelta = timedelta()) -> int:
    """Create a delivery for each channel of the recipients and of the project; return how many.

    `settle`: how long messages wait for further details, which they then include. Calling it twice creates no
    duplicates, because the key is unique. Unsent messages from an earlier raise are dropped as superseded.
    """
    stamp = f"{notice.key}@{notice.raised_at.timestamp():.6f}"
    now = timezone.now()
    notice.deliveries.unsent().exclude(key=stamp).update(state=DROPPED, error="Superseded by a newer message.")
    rows = [
        Delivery(channel=channel, key=stamp, notice=notice, kind=notice.kind, title=notice.title, **_when(channel, at))
        for channel in _channels(notice, project)
        if notice.kind not in channel.left_out and notice.key != failure_notice_key(channel.pk)
        for at in [now + settle]
    ]
    return len(Delivery.objects.bulk_create(rows, ignore_conflicts=True)) if rows else 0


def drop_duplicates(notice: Notice, other: Notice) -> int:
    """Drop a notice's unsent messages to channels that already got the same news by `other`; return how many."""
    reached_channels = other.deliveries.filter(state__in=[Delivery.State.SENT, Delivery.State.GATHERED]).values(
        "channel"
    )
    return (
        notice.deliveries.unsent()
        .filter(channel__in=reached_channels)
        .update(state=DROPPED, error="Already sent before.")
    )


def failure_notice_key(channel_id: int) -> str:
    """Return the key of the notice that a channel does not work; that notice is not sent to the channel itself."""
    return f"channel:{channel_id}"


def test(channel: Channel, by: str) -> Delivery:
    """Create a test message to the channel, sent immediately whatever its quiet hours are."""
    title = f"A test message, requested by {by}. If you can read it, the channel works."
    facts = [["Channel", str(channel)]]
    content = {**_plain(kinds.TEST, title), "facts": facts, "link": f"{settings.VIGIL_PUBLIC_URL}/me/"}
    Channel.objects.filter(pk=channel.pk).update(rests_until=None)
    return Delivery.objects.create(
        channel=channel, key=f"test:{uuid.uuid4()}", kind=kinds.TEST, title=title, content=content,
        due_at=timezone.now(),
    )  # fmt: skip


def content_of(notice: Notice) -> dict[str, Any]:
    """Return the current content of the notice, as it is sent."""
    link = f"{settings.VIGIL_PUBLIC_URL}{notice.link}" if notice.link else ""
    return {
        **_plain(notice.kind, notice.title),
        "key": notice.key,
        "detail": notice.detail,
        "tone": notice.tone,
        "link": link,
        "facts": notice.facts,
        "raised_at": notice.raised_at.isoformat(),
    }


def raised_text(content: dict[str, Any]) -> str:
    """Return when a message's notice was raised, with the day and the time zone: it may be read elsewhere and later."""
    raised_at = content.get("raised_at")
    return f"Raised {formatting.minute(datetime.fromisoformat(raised_at))}" if raised_at else ""


def _plain(kind: str, title: str) -> dict[str, Any]:
    defaults = {"key": "", "detail": "", "tone": "notice", "link": "", "facts": []}
    return {"kind": kind, "title": title, **defaults, "raised_at": timezone.now().isoformat()}


def hours_of(channel: Channel) -> DeliveryHours:
    start, end = channel.quiet_from, channel.quiet_until
    return DeliveryHours(channel.time_zone, None if start is None or end is None else (start, end), channel.digest)


def _channels(notice: Notice, project: Project | None) -> QuerySet[Channel]:
    recipients = Q(user__is_superuser=True) if notice.audience == Notice.Audience.SYSADMINS else Q(user=notice.user_id)
    wanted = recipients & Q(user__is_active=True)
    return Channel.objects.filter(wanted | Q(project=project) if project else wanted, is_paused=False)


def _when(channel: Channel, at: datetime) -> dict[str, Any]:
    due, is_held = hours_of(channel).due(at)
    return {"due_at": due, "state": HELD if is_held else WAITING}
