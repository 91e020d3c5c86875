"""Store what reliability is computed from: failures, allocated node time, and how much training of it was useful.

All rows outlive the job that they were counted from: a rate must not change because somebody deletes jobs.
"""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import Q

from jobs.models.incident import Incident
from jobs.models.job import Job
from portal.models import Project


class Failure(models.Model):
    """A counted incident: a person's cause takes precedence over the machine's."""

    incident = models.OneToOneField(Incident, models.SET_NULL, null=True, related_name="failure")
    at = models.DateTimeField()
    day = models.DateField(help_text="Day in UTC.")
    project = models.ForeignKey(Project, models.CASCADE, related_name="+", db_index=False)
    partition = models.CharField(max_length=255, blank=True)
    node = models.CharField(max_length=255, blank=True, help_text="Empty: unknown.")
    cause = models.CharField(max_length=32, blank=True, help_text="Empty: not diagnosed yet.")
    program = models.CharField(max_length=64, help_text="Equal for failures of the same program.")
    is_interruption = models.BooleanField(help_text="It can affect any run, or the run continued after it.")
    lost_node_s = models.FloatField(
        help_text="Node-seconds since the last usable checkpoint, plus those allocated until training resumed."
    )
    lost_gpu_s = models.FloatField()
    detect_s = models.FloatField(null=True, help_text="Seconds from the last step to the detected end.")
    recover_s = models.FloatField(null=True, help_text="Seconds from the end until training resumed.")
    is_settled = models.BooleanField(default=False, help_text="Only a person can still change it.")

    class Meta:
        indexes = (
            models.Index(fields=["day", "cause", "node", "lost_gpu_s"], name="failures_by_day"),
            models.Index(fields=["project", "day"], name="failures_of_a_project"),
            models.Index(fields=["node", "day"], condition=~Q(node=""), name="failures_of_a_node"),
            models.Index(fields=["day"], condition=Q(is_interruption=True), name="interruptions_by_day"),
            models.Index(fields=["at"], condition=Q(is_settled=False), name="failures_to_settle"),
        )

    def __str__(self) -> str:
        return f"{self.cause or 'not diagnosed'} on {self.day}"


class Held(models.Model):
    """Seconds in which nodes were allocated to attempts that have closed, times GPUs in `gpu_s`.

    Each is in the row of its day and in that of its week, so that a year is read from few.
    """

    days = models.PositiveSmallIntegerField(help_text="1, or 7 for the week that begins on this day, a Monday.")
    day = models.DateField(help_text="Day in UTC.")
    node_s = models.FloatField(default=0.0)
    gpu_s = models.FloatField(default=0.0)

    class Meta:
        abstract = True


class NodeHeld(Held):
    """The allocated time of one node, in all projects."""

    node = models.CharField(max_length=255)

    class Meta:
        constraints = (models.UniqueConstraint(fields=["days", "day", "node"], name="one_held_a_node"),)

    def __str__(self) -> str:
        return f"{self.node} on {self.day}"


class ProjectNodeHeld(Held):
    """The allocated time of one node in one project, for people who see their projects alone."""

    project = models.ForeignKey(Project, models.CASCADE, related_name="+", db_index=False)
    node = models.CharField(max_length=255)

    class Meta:
        constraints = (
            models.UniqueConstraint(fields=["project", "days", "day", "node"], name="one_held_a_project_and_node"),
        )

    def __str__(self) -> str:
        return f"{self.node} by {self.project_id} on {self.day}"


class ProjectHeld(Held):
    """The allocated time of a partition's nodes in one project, and how its ended jobs spent their time."""

    project = models.ForeignKey(Project, models.CASCADE, related_name="+", db_index=False)
    partition = models.CharField(max_length=255, blank=True)
    jobs_queued_s = models.FloatField(default=0.0, help_text="Sums of `JobTime`.")
    jobs_held_s = models.FloatField(default=0.0)
    jobs_kept_s = models.FloatField(default=0.0)

    class Meta:
        constraints = (
            models.UniqueConstraint(fields=["days", "day", "project", "partition"], name="one_held_a_project"),
        )

    def __str__(self) -> str:
        return f"{self.project_id} in {self.partition} on {self.day}"


class JobTime(models.Model):
    """The time of a job that has ended, over all its attempts, in node-seconds, so that jobs add up.

    The sums include the values stored here; if the job continues, these are subtracted and the new ones added.
    """

    job = models.BigIntegerField(unique=True)
    project = models.ForeignKey(Project, models.CASCADE, related_name="+", db_index=False)
    partition = models.CharField(max_length=255, blank=True)
    day = models.DateField(help_text="Day of its end.")
    queued_node_s = models.FloatField()
    held_node_s = models.FloatField()
    kept_node_s = models.FloatField(help_text="Node-seconds of steps whose work was kept.")

    def __str__(self) -> str:
        return f"#{self.job}"


class CadenceOrder(models.Model):
    """A request that a job saves at this interval of steps from its next attempt on, whatever its spec says."""

    job = models.OneToOneField(Job, models.CASCADE, related_name="cadence_order")
    every = models.PositiveIntegerField()
    asked_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    asked_at = models.DateTimeField(auto_now=True)

    def __str__(self) -> str:
        return f"#{self.job_id} every {self.every} steps"
