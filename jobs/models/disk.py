"""Store the sums of disk use by project."""

from __future__ import annotations

from django.db import models

from portal.models import Project


class DiskSum(models.Model):
    """The disk use of one project with all of its jobs, as of `counted_at` (jobs.disk.sums)."""

    project = models.OneToOneField(Project, models.CASCADE, primary_key=True, related_name="+")
    jobs = models.BigIntegerField(default=0)
    bytes = models.BigIntegerField(default=0)
    checkpoint_bytes = models.BigIntegerField(
        default=0, help_text="Size of checkpoints as reported by trainers, for the jobs included in `bytes`."
    )
    unmeasured = models.BigIntegerField(default=0, help_text="Number of jobs not measured yet.")
    partial = models.BigIntegerField(default=0, help_text="Number of jobs that were measured only in part.")
    oldest_job_at = models.DateTimeField(null=True)
    measured_at = models.DateTimeField(null=True, help_text="Time of the oldest measurement in the sum.")
    counted_at = models.DateTimeField()
    seconds = models.FloatField(help_text="How long the summation took.")

    def __str__(self) -> str:
        return f"disk of {self.project_id}"
