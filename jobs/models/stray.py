"""Store a stray: a job in the scheduler, certain or possible, whose attempt has ended."""

from __future__ import annotations

from django.db import models

from jobs.models.attempt import Attempt


class Stray(models.Model):
    """A job that reached the scheduler too late, to be cancelled until the scheduler confirms its end.

    Without a `scheduler_id` it is only suspected: a submission whose response was lost may still appear under its key.
    For an array that is the sweep's key, and `task` the index within it.
    """

    attempt = models.ForeignKey(Attempt, models.SET_NULL, null=True, related_name="strays")
    key = models.CharField(max_length=16)
    task = models.IntegerField(default=-1, help_text="Its index in the array; −1: not part of one.")
    scheduler_id = models.CharField(max_length=64, blank=True)
    scheduler_user = models.CharField(max_length=64, blank=True)
    since = models.DateTimeField(auto_now_add=True)
    tried_at = models.DateTimeField(null=True, blank=True, help_text="When it was last cancelled or searched for.")

    class Meta:
        constraints = (models.UniqueConstraint(fields=["key", "scheduler_id", "task"], name="one_row_a_stray"),)

    def __str__(self) -> str:
        return f"{self.scheduler_id or 'something'} of {self.key}"
