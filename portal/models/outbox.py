"""Store where people want to be notified outside of Vigil, and each message sent or to be sent (portal.outbox)."""

from __future__ import annotations

import secrets
import uuid
from typing import Self
from urllib.parse import urlsplit

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils import timezone

from portal.models.ground import Membership, Notice, Project, User


def _new_salt() -> str:
    return secrets.token_hex(16)


class ChannelQuerySet(models.QuerySet["Channel"]):
    def visible_to(self, user: User) -> Self:
        """Select a person's own channels and those of projects they lead; sysadmins see others' in the outbox."""
        led = user.memberships.filter(role=Membership.Role.LEAD).values("project")
        manageable = Q(user=user) | Q(project__in=led)
        return self.filter(manageable | Q(user=None) if user.is_sysadmin else manageable)


class Channel(models.Model):
    """An outside address where a person or a project is notified, of what, and when."""

    class Kind(models.TextChoices):
        EMAIL = "email", "E-mail"
        SLACK = "slack", "Slack, or a compatible webhook"
        WEBHOOK = "webhook", "Signed webhook"

    class Digest(models.TextChoices):
        NONE = "", "Immediately"
        HOURLY = "hourly", "Hourly digest"
        DAILY = "daily", "Daily digest at 08:00"

    user = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, null=True, blank=True, related_name="channels")
    project = models.ForeignKey(Project, models.CASCADE, null=True, blank=True, related_name="channels")
    kind = models.CharField(max_length=8, choices=Kind.choices)
    address = models.CharField(max_length=500, help_text="An e-mail address or a URL. Of a URL only the host is shown.")
    salt = models.CharField(
        max_length=32, default=_new_salt, help_text="The signing secret is derived from it and never stored."
    )
    left_out = models.JSONField(default=list, blank=True, help_text="Kinds of notifications that are not sent.")
    digest = models.CharField(max_length=8, choices=Digest.choices, default=Digest.NONE, blank=True)
    quiet_from = models.TimeField(null=True, blank=True, help_text="Start of quiet hours, in the channel's time zone.")
    quiet_until = models.TimeField(null=True, blank=True, help_text="End of quiet hours, in the channel's time zone.")
    time_zone = models.CharField(max_length=64, default="UTC")
    is_paused = models.BooleanField(default=False)
    rests_until = models.DateTimeField(
        null=True, blank=True, help_text="After a failure: when to retry at the earliest."
    )
    created_at = models.DateTimeField(default=timezone.now)

    objects = ChannelQuerySet.as_manager()

    class Meta:
        ordering = ("id",)
        constraints = (
            models.CheckConstraint(
                condition=Q(user=None, project__isnull=False) | Q(user__isnull=False, project=None),
                name="one_owner_a_channel",
            ),
        )

    def __str__(self) -> str:
        return f"{self.get_kind_display().partition(',')[0]}, {self.where}"

    @property
    def where(self) -> str:
        """Return the part of the address that may be shown: of a URL only the host, as the rest is often a secret."""
        if self.kind == self.Kind.EMAIL:
            return self.address
        return urlsplit(self.address).hostname or "?"


class DeliveryQuerySet(models.QuerySet["Delivery"]):
    def visible_to(self, user: User) -> Self:
        """Select messages to channels that this person may change; sysadmins see all."""
        return self if user.is_sysadmin else self.filter(channel__in=Channel.objects.visible_to(user).values("pk"))

    def unsent(self) -> Self:
        return self.filter(state__in=Delivery.UNSENT)


class Delivery(models.Model):
    """A message to a channel: a row of the outbox.

    A `held` one waits for the end of quiet hours or for its digest; a `gathered` one was sent as part of a digest.
    """

    class State(models.TextChoices):
        HELD = "held"
        WAITING = "waiting"
        SENT = "sent"
        GATHERED = "gathered", "in a digest"
        DROPPED = "dropped", "no longer relevant"
        GIVEN_UP = "given_up", "given up"

    UNSENT = (State.HELD, State.WAITING)

    uid = models.UUIDField(
        default=uuid.uuid4, unique=True, help_text="The same at each try, so that receivers can detect repeats."
    )
    channel = models.ForeignKey(Channel, models.CASCADE, related_name="deliveries")
    key = models.CharField(max_length=300, help_text="Identifies the content; unique per channel.")
    notice = models.ForeignKey(Notice, models.SET_NULL, null=True, blank=True, related_name="deliveries")
    kind = models.CharField(max_length=64)
    title = models.CharField(max_length=300)
    content = models.JSONField(null=True, blank=True, help_text="What is sent, fixed at the first try.")
    state = models.CharField(max_length=8, choices=State.choices, default=State.WAITING)
    due_at = models.DateTimeField(help_text="When it is tried next, or released.")
    tries = models.PositiveIntegerField(default=0)
    error = models.CharField(max_length=300, blank=True, help_text="Error of the last try.")
    carried_by = models.ForeignKey("self", models.SET_NULL, null=True, blank=True, related_name="carries")
    created_at = models.DateTimeField(default=timezone.now)
    sent_at = models.DateTimeField(null=True, blank=True)

    objects = DeliveryQuerySet.as_manager()

    class Meta:
        ordering = ("-id",)
        constraints = (models.UniqueConstraint(fields=["channel", "key"], name="one_delivery_a_channel"),)
        indexes = (
            models.Index(fields=["due_at"], condition=Q(state__in=["held", "waiting"]), name="deliveries_due"),
            models.Index(fields=["channel", "-id"], name="deliveries_of_a_channel"),
            models.Index(fields=["state", "-id"], name="deliveries_by_state"),
            models.Index(fields=["created_at"], name="deliveries_by_age"),
        )

    def __str__(self) -> str:
        return f"{self.kind} to {self.channel_id}, {self.state}"
