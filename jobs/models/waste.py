"""Store what allocated GPUs did, added up by project and person."""

from __future__ import annotations

from django.conf import settings
from django.db import models

from portal.models import Project


class GpuHours(models.Model):
    """The GPU-seconds of one project and person on one day (UTC): `nodes.models.GpuUse` of all their jobs together."""

    day = models.DateField()
    project = models.ForeignKey(
        Project, models.CASCADE, null=True, related_name="+", db_index=False, help_text="Null: submitted outside Vigil."
    )
    person = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, null=True, related_name="+", db_index=False)
    user = models.CharField(
        max_length=255, blank=True, help_text="The scheduler's user, if it belongs to no account here."
    )
    held_s = models.FloatField()
    used_s = models.FloatField()
    idle_s = models.FloatField()

    class Meta:
        indexes = (models.Index(fields=["day"], name="gpu_hours_by_day"),)

    def __str__(self) -> str:
        return f"{self.project_id or 'past Vigil'}, {self.person_id or self.user} on {self.day}"


class JobHours(models.Model):
    """The GPU-seconds of one job over all its days; for a job of Vigil's over all its attempts.

    So the jobs of many days are sorted without adding up all of their days first.
    """

    scheduler_id = models.CharField(
        max_length=64, db_index=True, help_text="The id of one attempt, if there are several."
    )
    job = models.BigIntegerField(null=True, db_index=True, help_text="Vigil's job number; null: not a Vigil job.")
    project = models.ForeignKey(Project, models.CASCADE, null=True, related_name="+", db_index=False)
    person = models.ForeignKey(settings.AUTH_USER_MODEL, models.CASCADE, null=True, related_name="+", db_index=False)
    user = models.CharField(max_length=255, blank=True)
    first_day = models.DateField()
    last_day = models.DateField()
    held_s = models.FloatField()
    used_s = models.FloatField()
    idle_s = models.FloatField()

    class Meta:
        indexes = (
            models.Index(fields=["first_day", "held_s", "used_s", "idle_s"], name="job_hours_by_first_day"),
            models.Index(
                fields=["last_day", "first_day"],
                condition=models.Q(last_day__gt=models.F("first_day")),
                name="job_hours_of_many_days",
            ),
        )

    def __str__(self) -> str:
        return f"{self.scheduler_id} from {self.first_day}"
