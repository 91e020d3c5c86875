"""What held GPUs did, added up by project and person."""

from __future__ import annotations

from django.conf import settings
from django.db import models

from portal.models import Project


class GpuHours(models.Model):
    """The GPU-seconds of one project and person on one day (UTC): `nodes.models.GpuUse` of all their jobs together."""

    day = models.DateField()
    project = models.ForeignKey(
        Project, models.CASCADE, null=True, related_name="+", db_index=False, help_text="Null: it went past Vigil."
    )
    person = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.CASCADE, null=True, related_name="+", db_index=False
    )
    user = models.CharField(max_length=255, blank=True, help_text="The scheduler's, where it is nobody's that we know.")
    held_s = models.FloatField()
    used_s = models.FloatField()
    idle_s = models.FloatField()

    class Meta:
        indexes = (models.Index(fields=["day"], name="gpu_hours_by_day"),)

    def __str__(self) -> str:
        return f"{self.project_id or 'past Vigil'}, {self.person_id or self.user} on {self.day}"
