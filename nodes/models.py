"""Nodes as the scheduler last described them."""

from django.db import models


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

    class Meta:
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name
