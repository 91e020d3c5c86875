"""Store which processes of the portal run: one row each, refreshed every ten seconds by the process itself."""

from __future__ import annotations

from django.db import models


class Heartbeat(models.Model):
    """A running process of the portal. It is in the database, so that a Redis that hangs hides nothing."""

    role = models.CharField(max_length=32, help_text="web, beat, or a worker's queue.")
    host = models.CharField(max_length=64)
    pid = models.IntegerField()
    at = models.DateTimeField(help_text="When it last reported, by the database's clock.")
    clock_offset_s = models.FloatField(default=0.0, help_text="Its own clock less the database's.")
    task = models.CharField(max_length=100, blank=True, help_text="Its task at that time.")
    task_seconds = models.FloatField(default=0.0, help_text="Seconds spent in that task.")

    class Meta:
        constraints = (models.UniqueConstraint(fields=["role", "host", "pid"], name="one_heartbeat_a_process"),)

    def __str__(self) -> str:
        return f"{self.role} on {self.host} ({self.pid})"
