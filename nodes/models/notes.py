"""Store sysadmins' notes about a machine."""

from __future__ import annotations

from django.conf import settings
from django.db import models


class NodeNote(models.Model):
    """A note about a node; it outlives the node's row, because machines come back."""

    MOST = 1_000  # characters

    node = models.CharField(max_length=255)
    text = models.TextField()
    by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    at = models.DateTimeField(auto_now_add=True)

    class Meta:
        ordering = ("-id",)
        indexes = (models.Index(fields=["node", "-id"], name="notes_of_a_node"),)

    def __str__(self) -> str:
        return f"{self.node}: {self.text[:40]}"
