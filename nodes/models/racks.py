"""Store where nodes are: a rack and a slot in it. People enter it; no scheduler reports it."""

from __future__ import annotations

from django.db import models


class RackPlace(models.Model):
    """A node's position. The node need not exist yet: a rack may be entered before its machines are switched on."""

    node = models.CharField(max_length=255, unique=True)
    rack = models.CharField(max_length=64)
    slot = models.IntegerField(default=0, help_text="Position from the top.")
    order = models.IntegerField(default=0, help_text="Position of the rack among racks; equal ones are sorted by name.")

    class Meta:
        ordering = ("order", "rack", "slot", "node")

    def __str__(self) -> str:
        return f"{self.node} in {self.rack}"
