"""Store the nodes that stand by for others."""

from __future__ import annotations

from typing import Self

from django.conf import settings
from django.db import models
from django.utils import timezone


class HotSpareQuerySet(models.QuerySet["HotSpare"]):
    def standby(self) -> Self:
        return self.filter(state=HotSpare.SpareState.STANDBY)


class HotSpare(models.Model):
    """A node that Vigil keeps drained until another of its partition fails.

    `standby`: drained as a spare. `serving`: in service, in place of the node that it `replaces`; without one, because
    a person undrained it. Once the replaced node is in service again, the two change places: that one is the spare.
    """

    class SpareState(models.TextChoices):
        STANDBY = "standby", "stands by"
        SERVING = "serving", "in service"

    node = models.CharField(max_length=255, unique=True)
    partition = models.CharField(max_length=255)
    state = models.CharField(max_length=16, choices=SpareState.choices, default=SpareState.STANDBY)
    replaces = models.CharField(max_length=255, blank=True, help_text="The node whose place it takes.")
    since = models.DateTimeField(default=timezone.now, help_text="Since when it is in this state.")
    added_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")

    objects = HotSpareQuerySet.as_manager()

    class Meta:
        ordering = ("partition", "node")
        verbose_name = "hot spare"

    def __str__(self) -> str:
        return self.node
