"""Store the sums of disk use by project."""

from __future__ import annotations

from django.db import models

from portal.models import Project


class DiskSum(models.Model):
    """The disk use of one project with all of its jobs, as of `counted_at` (jobs.disk.sums)."""

    project = models.OneToOneField(Project, models.CASCADE, primary_key=True, related_name="+")
    jobs = models.BigIntegerField(default=0)
    bytes = models.BigIntegerField(default=0)
    checkpoint_bytes = models.BigIntegerField(default=0, help_text="As trainers told, of jobs that `bytes` has.")
    unmeasured = models.BigIntegerField(default=0, help_text="Jobs that no look has counted yet.")
    partial = models.BigIntegerField(default=0, help_text="Jobs of which there is more than was counted.")
    oldest_job_at = models.DateTimeField(null=True)
    measured_at = models.DateTimeField(null=True, help_text="The oldest look that is in the sum.")
    counted_at = models.DateTimeField()
    seconds = models.FloatField(help_text="That adding up took.")

    def __str__(self) -> str:
        return f"disk of {self.project_id}"
