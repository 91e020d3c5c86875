"""Store a site's own entries of the failure catalogue, and the replay that shows what an entry would change."""

from __future__ import annotations

from datetime import timedelta
from typing import Self

from django.conf import settings
from django.db import models
from django.utils import timezone


class SiteEntry(models.Model):
    """An entry of the catalogue (`diagnosis.signatures.catalogue.Entry`) that sysadmins of this site wrote."""

    name = models.CharField(max_length=64, unique=True)
    role = models.CharField(max_length=16)
    cause = models.CharField(max_length=32)
    scope = models.CharField(max_length=16, default="program")
    pattern = models.TextField(blank=True)
    unless = models.TextField(blank=True)
    exception = models.TextField(blank=True)
    frame = models.TextField(blank=True)
    during = models.JSONField(default=list, blank=True)
    is_generic = models.BooleanField(default=False)
    advice = models.TextField(blank=True)
    source = models.TextField()
    frameworks = models.JSONField(default=list, blank=True)
    example = models.TextField()
    look_alike = models.TextField()

    is_enabled = models.BooleanField(default=True)
    made_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, blank=True, related_name="+")
    made_at = models.DateTimeField(default=timezone.now)
    changed_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, blank=True, related_name="+")
    changed_at = models.DateTimeField(default=timezone.now)

    class Meta:
        ordering = ("name",)
        verbose_name_plural = "site entries"

    def __str__(self) -> str:
        return self.name


class SiteCatalogue(models.Model):
    """The entries in force from a moment on, for earlier verdicts that are revised after a change."""

    RETENTION = timedelta(days=2)

    at = models.DateTimeField(default=timezone.now, db_index=True)
    entries = models.JSONField(help_text="Entries as TOML tables.")

    class Meta:
        ordering = ("-at", "-id")

    def __str__(self) -> str:
        return f"{len(self.entries)} entries from {self.at}"


class ReplayQuerySet(models.QuerySet["Replay"]):
    def old(self) -> Self:
        return self.filter(asked_at__lt=timezone.now() - Replay.RETENTION)


class Replay(models.Model):
    """Past incidents diagnosed again as if one entry were in force; their verdicts do not change.

    It continues as long as somebody watches, in small pieces between which real incidents come first.
    """

    RETENTION = timedelta(days=1)
    ABANDONED_AFTER = timedelta(seconds=60)  # without a viewer

    entry = models.JSONField(help_text="The entry as a TOML table.")
    instead_of = models.CharField(max_length=64, blank=True, help_text="Name of the entry that it replaces.")
    asked_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, related_name="+")
    asked_at = models.DateTimeField(default=timezone.now)
    seen_at = models.DateTimeField(default=timezone.now, help_text="When somebody last viewed it.")
    moved_at = models.DateTimeField(default=timezone.now, help_text="When it last made progress.")
    ended_at = models.DateTimeField(null=True, blank=True)
    outcome = models.CharField(
        max_length=200, blank=True, help_text="Why it stopped early; empty: it read all incidents."
    )

    incidents = models.JSONField(default=list, help_text="Ids of the incidents, in reading order.")
    place = models.PositiveIntegerField(default=0, help_text="Number of incidents done.")
    read = models.PositiveIntegerField(default=0, help_text="Number of incidents with readable logs.")
    named = models.PositiveIntegerField(default=0, help_text="Number of incidents of which it would be the root cause.")
    seconds = models.FloatField(default=0.0, help_text="Time spent reading.")
    changes = models.JSONField(
        default=list, help_text="The verdicts that it would change, in the form of `jobs.postmortem.replay`."
    )

    objects = ReplayQuerySet.as_manager()

    class Meta:
        ordering = ("-id",)

    def __str__(self) -> str:
        return f"replay {self.pk} of {self.name}"

    @property
    def name(self) -> str:
        return str(self.entry.get("name", ""))

    @property
    def of(self) -> int:
        return len(self.incidents)

    @property
    def is_going(self) -> bool:
        return self.ended_at is None
