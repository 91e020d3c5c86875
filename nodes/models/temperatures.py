"""Store what is learnt about the cooling of GPUs, and the inlet temperatures of racks by the hour."""

from __future__ import annotations

from django.db import models

from nodes.models.telemetry import Agent


class NodeThermals(models.Model):
    """What `nodes.health.inlet` has learnt about the GPUs of a node, by UUID."""

    agent = models.OneToOneField(Agent, models.CASCADE, related_name="thermals")
    gpus = models.JSONField(default=dict)
    updated_at = models.DateTimeField()

    def __str__(self) -> str:
        return f"thermals of {self.agent_id}"


class RackTemperature(models.Model):
    """The inlet temperature of a rack within one hour: the mean is `sum_c` / `count`."""

    rack = models.CharField(max_length=64)
    hour = models.DateTimeField()
    sum_c = models.FloatField(default=0.0)
    count = models.PositiveIntegerField(default=0)
    is_estimate = models.BooleanField(default=True)
    nodes = models.PositiveIntegerField(default=0, help_text="Nodes in the rack, whether they reported or not.")

    class Meta:
        constraints = (models.UniqueConstraint(fields=["rack", "hour"], name="one_temperature_a_rack_and_hour"),)
        indexes = (models.Index(fields=["hour"], name="temperatures_by_hour"),)

    def __str__(self) -> str:
        return f"{self.rack} at {self.hour}"
