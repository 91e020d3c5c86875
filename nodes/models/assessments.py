"""Store what slow computations found out about nodes, racks and programs, for health rules to read."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Self

from django.db import models

FRESH = timedelta(hours=2)
"""Older assessments say nothing: whatever computes them has stopped."""


class AssessmentQuerySet(models.QuerySet["Assessment"]):
    def fresh(self, now: datetime) -> Self:
        return self.filter(assessed_at__gt=now - FRESH)


class Assessment(models.Model):
    """The newest result of one signal about one subject: a node, or what `item` names if `node` is empty."""

    signal = models.CharField(max_length=32)
    node = models.CharField(max_length=255, blank=True)
    item = models.CharField(max_length=300, blank=True)
    fields = models.JSONField(default=dict)
    assessed_at = models.DateTimeField(db_index=True)
    noticed_at = models.DateTimeField(help_text="When it was last something else than normal.")

    objects = AssessmentQuerySet.as_manager()

    class Meta:
        constraints = (
            models.UniqueConstraint(fields=["signal", "node", "item"], name="one_assessment_a_signal_and_subject"),
        )

    def __str__(self) -> str:
        return f"{self.signal} of {self.node or self.item}"
