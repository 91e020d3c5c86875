"""Store planned maintenance of nodes."""

from __future__ import annotations

from datetime import datetime
from typing import Self

from django.conf import settings
from django.db import models
from django.utils import timezone

from nodes.health.requesters import MAINTENANCE_PREFIX


class MaintenanceWindowQuerySet(models.QuerySet["MaintenanceWindow"]):
    def unfinished(self) -> Self:
        """Select windows that are planned or have begun."""
        return self.filter(state__in=(MaintenanceWindow.WindowState.PLANNED, MaintenanceWindow.WindowState.ACTIVE))

    def open_at(self, now: datetime) -> Self:
        """Select windows that this moment lies in."""
        return self.unfinished().filter(starts_at__lte=now, ends_at__gt=now)


class MaintenanceWindow(models.Model):
    """Nodes on which somebody works from one time to another.

    `planned` until it begins, then `active`: its nodes are reserved in the scheduler, or drained by Vigil. `ended` and
    `cancelled` windows are over: what the window drained is undrained.
    """

    MAX_REASON = 150

    class WindowState(models.TextChoices):
        PLANNED = "planned"
        ACTIVE = "active"
        ENDED = "ended"
        CANCELLED = "cancelled"

    expression = models.CharField(max_length=2000, help_text="The nodes as they were named: dgx[01-16,20].")
    nodes = models.JSONField(default=list)
    reason = models.CharField(max_length=MAX_REASON)
    starts_at = models.DateTimeField()
    ends_at = models.DateTimeField()
    state = models.CharField(max_length=16, choices=WindowState.choices, default=WindowState.PLANNED)
    wants_reservation = models.BooleanField(
        default=False, help_text="Reserve the nodes in the scheduler, which then starts no job that would overlap."
    )
    reservation = models.CharField(max_length=64, blank=True, help_text="Its name, once the scheduler has it.")
    tried_at = models.DateTimeField(null=True, blank=True, help_text="Last call to the scheduler.")
    problem = models.TextField(blank=True, help_text="What the scheduler refused, or which nodes stay drained.")
    planned_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    planned_at = models.DateTimeField(default=timezone.now)
    cancelled_at = models.DateTimeField(
        null=True, blank=True, help_text="When it was cancelled: it ends once its nodes are returned."
    )
    ended_at = models.DateTimeField(null=True, blank=True)

    objects = MaintenanceWindowQuerySet.as_manager()

    class Meta:
        ordering = ("-id",)
        verbose_name = "maintenance window"
        indexes = (models.Index(fields=["state", "starts_at"], name="windows_by_state"),)

    def __str__(self) -> str:
        return f"maintenance of {self.expression[:60]}"

    @property
    def requester(self) -> str:
        """Return the name under which Vigil drains its nodes; it stands in the scheduler's reason."""
        return f"{MAINTENANCE_PREFIX}{self.pk}"

    @property
    def is_unfinished(self) -> bool:
        return self.state in (self.WindowState.PLANNED, self.WindowState.ACTIVE)

    @staticmethod
    def spans_by_node(since: datetime, now: datetime) -> dict[str, list[tuple[datetime, datetime]]]:
        """Return when each node was in maintenance between these moments: beginning and end, also of ended windows."""
        found: dict[str, list[tuple[datetime, datetime]]] = {}
        for window in MaintenanceWindow.objects.filter(starts_at__lte=now, ends_at__gt=since):
            for name in window.nodes:
                found.setdefault(name, []).append((window.starts_at, window.ended_at or window.ends_at))
        return found

    @staticmethod
    def ends_by_node(now: datetime) -> dict[str, datetime]:
        """Return until when each node is in maintenance now."""
        found: dict[str, datetime] = {}
        for nodes, ends_at in MaintenanceWindow.objects.open_at(now).values_list("nodes", "ends_at"):
            for name in nodes:
                found[name] = max(ends_at, found.get(name, ends_at))
        return found
