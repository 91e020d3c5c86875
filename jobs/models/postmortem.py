"""Store what people write about a bad end: the narrative, contributing factors, and follow-ups."""

from __future__ import annotations

from django.conf import settings
from django.db import models

from jobs.models.incident import Incident


class PostMortem(models.Model):
    """The people's part of a post-mortem; there is none until somebody writes it."""

    incident = models.OneToOneField(Incident, models.CASCADE, related_name="written")
    narrative = models.TextField(blank=True, help_text="What happened, as described by a person.")
    factors = models.JSONField(default=list, blank=True, help_text="Contributing factors, one sentence each.")
    revision = models.PositiveIntegerField(
        default=0, help_text="Incremented by each change, to detect concurrent edits."
    )
    edited_at = models.DateTimeField(null=True, blank=True)
    edited_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, blank=True, related_name="+")

    def __str__(self) -> str:
        return f"of {self.incident}"


class FollowUp(models.Model):
    """A task that people set themselves so that a failure does not recur."""

    postmortem = models.ForeignKey(PostMortem, models.CASCADE, related_name="follow_ups")
    text = models.CharField(max_length=300)
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, blank=True, related_name="+")
    due = models.DateField(null=True, blank=True)
    done_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ("id",)

    def __str__(self) -> str:
        return self.text
