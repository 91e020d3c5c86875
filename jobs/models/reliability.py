"""Store what reliability is computed from: failures, allocated node time, and how much of it was useful training.

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


class AllocatedTime(models.Model):
    """Node-seconds and GPU-seconds (`node_s`, `gpu_s`) that were allocated to attempts that have closed.

    Each day's seconds are stored twice: in the row of the day, and in the sum of its week, so that a report on a year
    reads few rows.
    """

    days = models.PositiveSmallIntegerField(help_text="1, or 7 for the week that begins on this day, a Monday.")
    day = models.DateField(help_text="Day in UTC.")
    node_s = models.FloatField(default=0.0)
    gpu_s = models.FloatField(default=0.0)

    class Meta:
        abstract = True


class NodeHeld(AllocatedTime):
    """The allocated time of one node, in all projects."""

    node = models.CharField(max_length=255)

    class Meta:
        constraints = (models.UniqueConstraint(fields=["days", "day", "node"], name="one_held_a_node"),)

    def __str__(self) -> str:
        return f"{self.node} on {self.day}"


class ProjectNodeHeld(AllocatedTime):
    """The allocated time of one node in one project, for people who see only their own projects."""

    project = models.ForeignKey(Project, models.CASCADE, related_name="+", db_index=False)
    node = models.CharField(max_length=255)

    class Meta:
        constraints = (
            models.UniqueConstraint(fields=["project", "days", "day", "node"], name="one_held_a_project_and_node"),
        )

    def __str__(self) -> str:
        return f"{self.node} by {self.project_id} on {self.day}"


class ProjectHeld(AllocatedTime):
    """The allocated time of a partition's nodes in one project, and how its ended jobs spent their time.

    `jobs_queued_s`, `jobs_held_s` and `jobs_kept_s` are sums of the columns of `JobTime`.
    """

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
    """How a job that has ended spent its time, over all its attempts, in node-seconds.

    `queued_node_s`: in the queue. `held_node_s`: allocated. `kept_node_s`: the part of the allocated time whose steps
    were not lost, as a checkpoint or the end of the job preserved them.

    `ProjectHeld` sums these values. If the job continues, they are subtracted there and the new ones added.
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
    """A person's request that a job saves every `every` steps from its next attempt on, whatever its spec says."""

    job = models.OneToOneField(Job, models.CASCADE, related_name="cadence_order")
    every = models.PositiveIntegerField()
    asked_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    asked_at = models.DateTimeField(auto_now=True)

    def __str__(self) -> str:
        return f"#{self.job_id} every {self.every} steps"
