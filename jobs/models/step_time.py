"""Store how long the steps of an attempt took, to compare nodes by them."""

from __future__ import annotations

from django.db import models

from jobs.models.attempt import Attempt


class AttemptPace(models.Model):
    """The median step of one attempt, measured while it runs and once after it has ended."""

    attempt = models.OneToOneField(Attempt, models.CASCADE, related_name="measured_pace")
    program = models.CharField(max_length=32, blank=True, help_text="Equal for attempts that do the same; empty: none.")
    step_s = models.FloatField(null=True, help_text="Median; null: it has reported too few steps.")
    steps = models.BigIntegerField(default=0)
    measured_at = models.DateTimeField(db_index=True)
    is_final = models.BooleanField(default=False, help_text="It had ended when it was measured.")

    def __str__(self) -> str:
        return f"pace of {self.attempt_id}"
