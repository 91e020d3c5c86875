"""Store a site's own runbook for a cause of failures, shown instead of Vigil's."""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.utils import timezone


class SiteRunbook(models.Model):
    """The site's page on one cause, in Markdown. Without one, Vigil's own is shown."""

    MAX_LENGTH = 20_000  # characters

    code = models.CharField(max_length=32, unique=True)
    text = models.TextField(max_length=MAX_LENGTH)
    changed_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    changed_at = models.DateTimeField(default=timezone.now)

    def __str__(self) -> str:
        return self.code
