"""Nodes as the scheduler last described them."""

from __future__ import annotations

from django.db import models

DEMO = "demo"


class NodeQuerySet(models.QuerySet["Node"]):
    def scheduled(self) -> NodeQuerySet:
        """Those that the scheduler named: all but the made-up ones of `vigil up --demo`, in a partition DEMO."""
        return self.exclude(partition=DEMO)


class Node(models.Model):
    """A machine that jobs run on. State words are Slurm's, lower-case."""

    name = models.CharField(max_length=255, unique=True)
    state = models.CharField(max_length=32, default="idle")
    reason = models.TextField(blank=True)
    partition = models.CharField(max_length=64, blank=True)
    cpus = models.PositiveIntegerField(default=0)
    cpus_used = models.PositiveIntegerField(default=0)
    gpus = models.PositiveIntegerField(default=0)
    gpus_used = models.PositiveIntegerField(default=0)
    gpu_type = models.CharField(max_length=64, blank=True)
    memory_mib = models.PositiveBigIntegerField(default=0)
    seen_at = models.DateTimeField(null=True, blank=True)

    objects = NodeQuerySet.as_manager()

    class Meta:
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name
