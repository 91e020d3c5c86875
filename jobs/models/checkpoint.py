"""Store a checkpoint that a trainer committed."""

from __future__ import annotations

import re
from typing import Self

from django.db import models
from django.db.models import Case, Q, When

from jobs.models.attempt import Attempt
from jobs.models.job import Job

_EXACT = re.compile(r"step-(?P<step>\d{1,15})\.g(?P<generation>\d{1,9})", re.ASCII)


class CheckpointQuerySet(models.QuerySet["Checkpoint"]):
    def resumable(self) -> Self:
        """Return checkpoints to start from: committed, and not found corrupt."""
        return self.filter(state__in=Checkpoint.RESUMABLE)

    def pinned(self) -> Self:
        """Return checkpoints that must not be removed; a pin on a pruned one has no effect."""
        return self.filter(pinned=True).exclude(state=Checkpoint.State.PRUNED)

    def by_name(self, name: str) -> Self:
        """Find by the folder's name, existing checkpoints first, then the newest. step-<n>.g<generation> is exact."""
        named = Q(name=name)
        if exact := _EXACT.fullmatch(name):
            named |= Q(step=int(exact["step"]), generation=int(exact["generation"]))
        is_gone = Case(When(state=Checkpoint.State.PRUNED, then=1), default=0)
        return self.filter(named).order_by(is_gone, "-generation")


class Checkpoint(models.Model):
    """Saved state at a step; `parent_step` makes the line of descent (protocols.md §4)."""

    class State(models.TextChoices):
        COMMITTED = "committed"
        VERIFIED = "verified"
        CORRUPT = "corrupt"
        PRUNED = "pruned"

    RESUMABLE = frozenset({"committed", "verified"})

    job = models.ForeignKey(Job, models.CASCADE, related_name="checkpoints")
    attempt = models.ForeignKey(Attempt, models.CASCADE, related_name="checkpoints")
    step = models.BigIntegerField()
    name = models.CharField(max_length=64, help_text="Folder under job/checkpoints: step-N, or step-N.gGENERATION.")
    generation = models.PositiveIntegerField()
    parent_step = models.BigIntegerField(null=True, blank=True)
    parent_generation = models.PositiveIntegerField(null=True, blank=True)
    state = models.CharField(max_length=16, choices=State.choices, default=State.COMMITTED)
    problem = models.TextField(blank=True, help_text="What verification found wrong.")
    verify_tries = models.PositiveSmallIntegerField(default=0, help_text="Number of failed attempts to read it.")
    verify_after = models.DateTimeField(
        null=True, blank=True, help_text="Earliest time of the next verification; null: now."
    )
    bytes = models.BigIntegerField(default=0)
    seconds = models.FloatField(null=True, blank=True, help_text="Seconds from the first rank's staging to COMMITTED.")
    consumed_samples = models.BigIntegerField(null=True, blank=True)
    world_size = models.PositiveIntegerField(null=True, blank=True)
    pinned = models.BooleanField(default=False)
    created_at = models.DateTimeField()

    objects = CheckpointQuerySet.as_manager()

    class Meta:
        ordering = ("-step", "-generation")
        constraints = (models.UniqueConstraint(fields=["job", "step", "generation"], name="one_row_a_checkpoint"),)
        indexes = (
            models.Index(fields=["state", "created_at"], name="checkpoints_by_state"),
            models.Index(fields=["state", "-id"], name="checkpoints_newest_of_state"),
        )

    def __str__(self) -> str:
        return f"step {self.step}"

    @property
    def resumable(self) -> bool:
        return self.state in self.RESUMABLE


class EarlyPrune(models.Model):
    """A checkpoint whose removal was reported before its commit: when the commit arrives it is already removed."""

    job = models.ForeignKey(Job, models.CASCADE, related_name="+", db_index=False)
    step = models.BigIntegerField()
    generation = models.PositiveIntegerField()

    class Meta:
        constraints = (
            models.UniqueConstraint(fields=["job", "step", "generation"], name="one_early_prune_a_checkpoint"),
        )

    def __str__(self) -> str:
        return f"step {self.step}, generation {self.generation}"
