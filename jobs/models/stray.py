"""A stray: what the scheduler may have, or has, of an attempt that does not want it."""

from __future__ import annotations

from django.db import models

from jobs.models.attempt import Attempt


class Stray(models.Model):
    """A job of the scheduler's that came too late, to be cancelled until the scheduler confirms its end.

    Without a `scheduler_id` it is only feared: a submission whose answer was lost may still turn up under its key. Of
    an array that is the sweep's, and `task` says which one of it.
    """

    attempt = models.ForeignKey(Attempt, models.SET_NULL, null=True, related_name="strays")
    key = models.CharField(max_length=16)
    task = models.IntegerField(default=-1, help_text="Its number in the array; −1: it is not of one.")
    scheduler_id = models.CharField(max_length=64, blank=True)
    scheduler_user = models.CharField(max_length=64, blank=True)
    since = models.DateTimeField(auto_now_add=True)
    tried_at = models.DateTimeField(null=True, blank=True, help_text="Last cancelled, or looked for.")

    class Meta:
        constraints = (models.UniqueConstraint(fields=["key", "scheduler_id", "task"], name="one_row_a_stray"),)

    def __str__(self) -> str:
        return f"{self.scheduler_id or 'something'} of {self.key}"
