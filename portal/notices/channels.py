"""Create, change and list the channels by which a person or a project is notified outside of Vigil."""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from django.db.models import OuterRef, Q, QuerySet, Subquery
from django.utils import timezone

from portal import notify
from portal.access import can, note
from portal.audit import Change
from portal.models import Channel, Delivery, Project, User
from portal.outbox import filling, pruning
from portal.sending import webhook

MAX_CHANNELS = 10  # per person, or per project


class TooManyChannels(Exception):
    """Raised when the limit of channels is reached."""


class NotSent(Exception):
    """Raised when there is nothing to send; the message gives the reason."""


@dataclass(frozen=True)
class ChannelRow:
    """A channel with its last message."""

    channel: Channel
    last: Delivery | None


def shown(channels: QuerySet[Channel]) -> list[ChannelRow]:
    newest = Delivery.objects.filter(channel=OuterRef("pk")).order_by("-id").values("pk")[:1]
    found = list(channels.annotate(last_id=Subquery(newest))[: 10 * MAX_CHANNELS])
    last = Delivery.objects.in_bulk([channel.last_id for channel in found if channel.last_id])
    return [ChannelRow(channel, last.get(channel.last_id)) for channel in found]


def of_person(user: User) -> list[ChannelRow]:
    return shown(Channel.objects.filter(user=user))


def of_projects(user: User) -> list[ChannelRow]:
    """Return the channels of projects that the person leads; of all projects for sysadmins."""
    return shown(Channel.objects.visible_to(user).exclude(project=None).select_related("project"))


def may_make(user: User, project: Project | None) -> bool:
    return project is None or can(user, "manage", project)


def make(user: User, project: Project | None, kind: str, fields: dict[str, Any]) -> Channel:
    """Create a channel of the person, or of the project."""
    owner: dict[str, Any] = {"project": project} if project else {"user": user}
    if Channel.objects.filter(**owner).count() >= MAX_CHANNELS:
        raise TooManyChannels(f"{project or 'You'} can have at most {MAX_CHANNELS} channels. Remove one first.")
    channel = Channel.objects.create(kind=kind, **owner, **fields)
    if project:
        note(user, "channel.made", project, str(channel), Change(after=_values(channel)))
    return channel


def change(user: User, channel: Channel, fields: dict[str, Any]) -> None:
    """Change a channel. Waiting messages keep their time; if the channel is paused they are dropped."""
    before = _values(channel)
    Channel.objects.filter(pk=channel.pk).update(**fields, rests_until=None)
    if fields.get("is_paused"):
        pruning.drop_unsent(channel, "The channel was paused.")
    if fields.get("is_paused") or fields.get("address", channel.address) != channel.address:
        notify.withdraw(filling.failure_notice_key(channel.pk))
    if channel.project:
        after = _values(Channel.objects.get(pk=channel.pk))
        note(user, "channel.changed", channel.project, str(channel), Change(before=before, after=after))


def renew_secret(user: User, channel: Channel) -> str:
    """Replace the signing secret and return the new one, shown only this once; the previous one becomes invalid."""
    channel.salt = secrets.token_hex(16)
    Channel.objects.filter(pk=channel.pk).update(salt=channel.salt)
    if channel.project:
        note(user, "channel.secret", channel.project, str(channel))
    return webhook.secret_of(channel)


def remove(user: User, channel: Channel) -> None:
    if channel.project:
        note(user, "channel.removed", channel.project, str(channel), Change(before=_values(channel)))
    notify.withdraw(filling.failure_notice_key(channel.pk))
    channel.delete()


def _values(channel: Channel) -> dict[str, Any]:
    """Return what the audit log stores of a channel. Of an address only what may be shown."""
    names = ("kind", "where", "left_out", "digest", "quiet_from", "quiet_until", "time_zone", "is_paused")
    return {("sent together" if name == "digest" else name): getattr(channel, name) for name in names}


def send_test(user: User, channel: Channel) -> Delivery:
    return filling.test(channel, user.username)


# The outbox


def resend(delivery: Delivery) -> None:
    """Queue a message to be sent again at once, with the content of its first attempt.

    Without such an attempt its notice must still be active. Raises NotSent if there is nothing to send.
    """
    if delivery.channel.is_paused:
        raise NotSent("This channel is paused: nothing is sent to it. Resume it first.")
    again = {Delivery.State.GIVEN_UP, Delivery.State.SENT, Delivery.State.WAITING, Delivery.State.HELD}
    is_so = Q(content__isnull=False) | Q(notice__withdrawn_at=None)
    rows = Delivery.objects.filter(is_so, pk=delivery.pk, state__in=again)
    if not rows.update(state=Delivery.State.WAITING, due_at=timezone.now(), tries=0, error="", sent_at=None):
        raise NotSent("It was sent in a digest, or no longer applies: there is nothing to send.")
    Channel.objects.filter(pk=delivery.channel_id).update(rests_until=None)


def give_up(delivery: Delivery, by: str) -> bool:
    """Give up on an unsent message; return whether it was unsent."""
    rows = Delivery.objects.unsent().filter(pk=delivery.pk)
    return bool(rows.update(state=Delivery.State.GIVEN_UP, error=f"Given up by {by}."[:300]))
