"""Store game days: faults planted in small jobs and on nodes, and how Vigil handled each."""

from __future__ import annotations

from typing import Self

from django.conf import settings
from django.db import models
from django.db.models import Q

from jobs.models.job import Job
from nodes.models import HealthEntry
from portal.models import Project


class GameDayQuerySet(models.QuerySet["GameDay"]):
    def active(self) -> Self:
        """Select game days that are not over."""
        return self.filter(ended_at=None)


class GameDay(models.Model):
    """A sequence of drills on one partition, one after the other: each plants one fault, in a job or on a node."""

    project = models.ForeignKey(Project, models.CASCADE, related_name="+", help_text="Its jobs belong to it.")
    partition = models.CharField(max_length=255, blank=True, help_text="Empty: the scheduler's default.")
    version = models.CharField(max_length=64, help_text="Vigil's version.")
    started_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    requested_at = models.DateTimeField(auto_now_add=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    cancel_requested_at = models.DateTimeField(null=True, blank=True)
    problem = models.TextField(blank=True, help_text="Why it ended early.")

    objects = GameDayQuerySet.as_manager()

    class Meta:
        ordering = ("-id",)
        constraints = (
            models.UniqueConstraint(fields=["partition"], condition=Q(ended_at=None), name="one_game_day_a_partition"),
        )

    def __str__(self) -> str:
        return f"game day {self.pk}"

    @property
    def is_active(self) -> bool:
        return self.ended_at is None


class Drill(models.Model):
    """Stores one fault of a game day: its job or its node, and how Vigil responded to it.

    Seconds count from the fault. A null answer means that the question does not arise, as whether an undisturbed run
    was restarted.
    """

    class DrillState(models.TextChoices):
        WAITING = "waiting"
        RUNNING = "running"
        PASSED = "passed"
        FAILED = "failed"
        NOT_TRIED = "not tried"

    game_day = models.ForeignKey(GameDay, models.CASCADE, related_name="drills")
    position = models.PositiveSmallIntegerField()
    fault = models.CharField(max_length=32)
    state = models.CharField(max_length=16, choices=DrillState.choices, default=DrillState.WAITING)
    job = models.OneToOneField(Job, models.SET_NULL, null=True, blank=True, related_name="drill")
    entry = models.ForeignKey(HealthEntry, models.SET_NULL, null=True, blank=True, related_name="+", db_index=False)
    submitted_at = models.DateTimeField(null=True, blank=True)
    node = models.CharField(max_length=255, blank=True)
    driver = models.CharField(max_length=64, blank=True, help_text="The node's NVIDIA driver.")
    slurm = models.CharField(max_length=64, blank=True, help_text="The node's version of Slurm.")
    planted_at = models.DateTimeField(null=True, blank=True)
    noticed_s = models.FloatField(null=True, blank=True, help_text="Until Vigil knew that something had failed.")
    verdict_s = models.FloatField(null=True, blank=True, help_text="Until the first verdict.")
    cause = models.CharField(max_length=64, blank=True, help_text="The verdict, or the health rule that noticed it.")
    is_cause_right = models.BooleanField(null=True, blank=True)
    action = models.TextField(blank=True, help_text="What Vigil decided.")
    is_action_right = models.BooleanField(null=True, blank=True)
    in_service_s = models.FloatField(null=True, blank=True, help_text="Until the drained node was back in service.")
    training_again_s = models.FloatField(null=True, blank=True, help_text="Until the first step of the next attempt.")
    are_losses_identical = models.BooleanField(null=True, blank=True, help_text="To those of the undisturbed run.")
    detail = models.TextField(blank=True, help_text="What went wrong, or why it was not tried.")

    class Meta:
        ordering = ("position",)
        constraints = (models.UniqueConstraint(fields=["game_day", "fault"], name="a_fault_once_a_game_day"),)
        indexes = (models.Index(fields=["fault", "-id"], name="drills_of_a_fault"),)

    def __str__(self) -> str:
        return f"{self.fault} of game day {self.game_day_id}"

    @property
    def is_over(self) -> bool:
        return self.state not in (self.DrillState.WAITING, self.DrillState.RUNNING)
