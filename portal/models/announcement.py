"""Store announcements: what sysadmins tell everybody at home, on the submit page and at the command line."""

from __future__ import annotations

from datetime import datetime
from typing import Self

from django.conf import settings
from django.db import models
from django.db.models import Q
from django.utils import timezone

from portal.models.ground import User


class AnnouncementQuerySet(models.QuerySet["Announcement"]):
    def shown(self, now: datetime | None = None) -> Self:
        """Select what is shown now."""
        now = now or timezone.now()
        return self.pending(now).filter(starts_at__lte=now)

    def pending(self, now: datetime | None = None) -> Self:
        """Select what is shown now or will be."""
        now = now or timezone.now()
        return self.filter(Q(ends_at=None) | Q(ends_at__gt=now), withdrawn_at=None)

    def visible_to(self, user: User) -> Self:
        """Select what is shown or was; sysadmins also see what is planned or withdrawn."""
        return self if user.is_sysadmin else self.filter(starts_at__lte=timezone.now(), withdrawn_at=None)


class Announcement(models.Model):
    """A short plain text for everybody who is signed in, from a time until a time."""

    MAX_LENGTH = 400  # characters

    class Level(models.TextChoices):
        INFO = "info"
        WARNING = "warning"
        CRITICAL = "critical"

    text = models.CharField(max_length=MAX_LENGTH)
    level = models.CharField(max_length=16, choices=Level.choices, default=Level.INFO)
    starts_at = models.DateTimeField(default=timezone.now)
    ends_at = models.DateTimeField(null=True, blank=True, help_text="Empty: until it is withdrawn.")
    written_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    written_at = models.DateTimeField(default=timezone.now)
    withdrawn_at = models.DateTimeField(null=True, blank=True)

    objects = AnnouncementQuerySet.as_manager()

    class Meta:
        ordering = ("-id",)
        indexes = (models.Index(fields=["ends_at"], condition=Q(withdrawn_at=None), name="announcements_standing"),)

    def __str__(self) -> str:
        return self.text[:60]

    @property
    def is_shown(self) -> bool:
        now = timezone.now()
        return self.withdrawn_at is None and self.starts_at <= now and (self.ends_at is None or self.ends_at > now)
