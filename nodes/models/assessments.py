"""Store what slow computations found out about nodes, racks and programs, for health rules to read."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Self

from django.db import models
from django.db.models import Q

FRESH = timedelta(minutes=15)
"""Three intervals. An older assessment is ignored: its computation has stopped."""
FRESH_EACH_MINUTE = timedelta(minutes=3)
EACH_MINUTE = ("rack_inlet",)
"""Signals that are assessed each minute; the others every five (portal.ticks)."""


class AssessmentQuerySet(models.QuerySet["Assessment"]):
    def fresh(self, now: datetime) -> Self:
        """Select assessments that are recent enough to count as the current state."""
        is_slow = ~Q(signal__in=EACH_MINUTE) & Q(assessed_at__gt=now - FRESH)
        return self.filter(is_slow | Q(signal__in=EACH_MINUTE, assessed_at__gt=now - FRESH_EACH_MINUTE))


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
