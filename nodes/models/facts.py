"""Store the cluster as the scheduler last reported it: nodes, partitions, limits, shares, licenses, queue.

A row's columns are the fields of its dataclass (nodes.schedulers.base and .cluster), with tuples as lists and times as
datetimes; `nodes.cluster.rows` converts between them.
"""

from __future__ import annotations

from typing import Any, Self, TypeVar

from django.db import models

from nodes.scheduling import gpu_types, node_states
from portal.models import User
from vigil_core import formatting

Row = TypeVar("Row", bound="Fact", covariant=True)
Names = models.JSONField  # a list of strings, unless stated otherwise


class FactQuerySet(models.QuerySet[Row]):
    def reported(self) -> Self:
        """Return the rows that the scheduler reported, without the invented ones of `vigil up --demo`."""
        return self.filter(is_made_up=False)


class Fact(models.Model):
    """A record that the scheduler reported. `digest` shows whether it is unchanged: then nothing is written.

    It is empty if the last answer had no readable record of it (`nodes.cluster.rows`).
    """

    digest = models.CharField(max_length=32, blank=True, editable=False)
    is_made_up = models.BooleanField(
        default=False, help_text="Created by `vigil up --demo`; the scheduler does not know it."
    )

    class Meta:
        abstract = True


class Node(Fact):
    """A machine that jobs run on. `state` is one word of Slurm's, lower-case."""

    name = models.CharField(max_length=255, unique=True)
    state = models.CharField(max_length=32, default="idle")
    reason = models.TextField(blank=True)
    reason_by = models.TextField(blank=True)
    reason_at = models.DateTimeField(null=True, blank=True)
    partitions = Names(default=list, blank=True)
    features = Names(default=list, blank=True)
    cpus = models.IntegerField(default=0)
    cpus_used = models.IntegerField(default=0)
    gpus = models.IntegerField(default=0)
    gpus_used = models.IntegerField(default=0)
    gpu_type = models.CharField(max_length=255, blank=True)
    gpus_by_type = models.JSONField(default=dict, blank=True, help_text="Counts by type, if it has several.")
    gpus_used_by_type = models.JSONField(default=dict, blank=True)
    gpus_allocated = models.JSONField(
        default=list, blank=True, help_text="Indices of allocated GPUs, if the scheduler reports them."
    )
    memory_mib = models.BigIntegerField(default=0)
    memory_used_mib = models.BigIntegerField(default=0)
    load = models.FloatField(null=True, blank=True)
    booted_at = models.DateTimeField(null=True, blank=True)
    plays_many = models.BooleanField(default=False, help_text="One machine that acts as many nodes as a job requests.")

    objects = FactQuerySet.as_manager()

    class Meta:
        ordering = ("name",)

    def __str__(self) -> str:
        return self.name

    @property
    def is_stale(self) -> bool:
        """Return whether the scheduler's last answer had no readable record of it: the row is older."""
        return not self.digest

    @property
    def is_in_service(self) -> bool:
        return node_states.is_in_service(self.state)

    @property
    def is_drained(self) -> bool:
        return node_states.is_drained(self.state)

    @property
    def takes_jobs(self) -> bool:
        """Return whether a job can start on it now: not while it is drained, down, reserved, rebooting …"""
        return not node_states.closed_reason(self.state)

    @property
    def has_jobs(self) -> bool:
        """Return whether jobs may run on it, though it may be drained: DRAIN with allocated CPUs, or completing."""
        return bool(self.cpus_used or self.gpus_used) or node_states.runs_jobs(self.state)

    @property
    def cpus_free(self) -> int:
        return self._free(self.cpus, self.cpus_used)

    @property
    def gpus_free(self) -> int:
        return self._free(self.gpus, self.gpus_used)

    @property
    def gpu_types(self) -> list[dict[str, Any]]:
        """Return its types in the scheduler's order, each with how many there are, are used and are free."""
        used = gpu_types.used(self)
        return [
            {"type": kind, "gpus": count, "used": used.get(kind, 0), "free": self._free(count, used.get(kind, 0))}
            for kind, count in gpu_types.installed(self).items()
        ]

    @property
    def gpu_text(self) -> str:
        """Return "h100", or "1 a100, 7 1g.10gb" where there are several types."""
        return gpu_types.text(self)

    @property
    def memory_free_mib(self) -> int:
        return self._free(self.memory_mib, self.memory_used_mib)

    def _free(self, there: int, used: int) -> int:
        return max(0, there - used) if self.takes_jobs else 0


class Partition(Fact):
    name = models.CharField(max_length=255, unique=True)
    state = models.CharField(max_length=32, default="up")
    is_default = models.BooleanField(default=False)
    nodes = Names(default=list, blank=True)
    max_time_s = models.BigIntegerField(null=True, blank=True)
    default_time_s = models.BigIntegerField(null=True, blank=True)
    max_nodes = models.BigIntegerField(null=True, blank=True)
    min_nodes = models.BigIntegerField(default=0)
    priority_tier = models.BigIntegerField(default=1)
    preempt_mode = models.CharField(max_length=64, blank=True)
    qos = models.CharField(max_length=255, blank=True)
    allowed_accounts = Names(default=list, blank=True)
    denied_accounts = Names(default=list, blank=True)
    allowed_qos = Names(default=list, blank=True)
    denied_qos = Names(default=list, blank=True)

    objects = FactQuerySet.as_manager()

    class Meta:
        ordering = ("-is_default", "name")

    def __str__(self) -> str:
        return self.name


class Qos(Fact):
    name = models.CharField(max_length=255, unique=True)
    description = models.TextField(blank=True)
    priority = models.BigIntegerField(default=0)
    preempts = Names(default=list, blank=True)
    flags = Names(default=list, blank=True)
    limits = models.JSONField(default=dict, blank=True)

    objects = FactQuerySet.as_manager()

    class Meta:
        ordering = ("name",)
        verbose_name = "QOS"
        verbose_name_plural = "QOS"

    def __str__(self) -> str:
        return self.name


class AssociationQuerySet(FactQuerySet["Association"]):
    def visible_to(self, user: User) -> Self:
        """Select a person's own; sysadmins see all."""
        if user.is_sysadmin:
            return self
        return self.filter(user=user.slurm_user) if user.slurm_user else self.none()


class Association(Fact):
    """An account (`user` empty), or a person's membership of it."""

    account = models.CharField(max_length=255)
    user = models.CharField(max_length=255, blank=True)
    partition = models.CharField(max_length=255, blank=True)
    parent = models.CharField(max_length=255, blank=True)
    qos = Names(default=list, blank=True)
    default_qos = models.CharField(max_length=255, blank=True)
    is_default = models.BooleanField(default=False)
    shares = models.BigIntegerField(null=True, blank=True)
    fair_share = models.FloatField(null=True, blank=True)
    usage = models.FloatField(null=True, blank=True)
    limits = models.JSONField(default=dict, blank=True)

    objects = AssociationQuerySet.as_manager()

    class Meta:
        ordering = ("account", "user", "partition")
        constraints = (models.UniqueConstraint(fields=["account", "user", "partition"], name="one_association"),)

    def __str__(self) -> str:
        return " / ".join(part for part in (self.account, self.user, self.partition) if part)


class Reservation(Fact):
    name = models.CharField(max_length=255, unique=True)
    nodes = Names(default=list, blank=True)
    starts_at = models.DateTimeField(null=True, blank=True)
    ends_at = models.DateTimeField(null=True, blank=True)
    users = Names(default=list, blank=True)
    accounts = Names(default=list, blank=True)
    partition = models.CharField(max_length=255, blank=True)
    flags = Names(default=list, blank=True)

    objects = FactQuerySet.as_manager()

    class Meta:
        ordering = ("starts_at", "name")

    def __str__(self) -> str:
        return self.name


class License(Fact):
    """A license that jobs occupy while they run."""

    name = models.CharField(max_length=255, unique=True)
    total = models.BigIntegerField(default=0)
    used = models.BigIntegerField(default=0)
    reserved = models.BigIntegerField(default=0)

    objects = FactQuerySet.as_manager()

    class Meta:
        ordering = ("name",)
        verbose_name = "licence"

    def __str__(self) -> str:
        return self.name

    @property
    def free(self) -> int:
        return max(0, self.total - self.used)


class QueuedJob(Fact):
    """A pending or running job of any user of the scheduler."""

    scheduler_id = models.CharField(max_length=64, unique=True)
    component = models.CharField(max_length=64, blank=True, help_text="85+1: a component of heterogeneous job 85.")
    name = models.TextField()
    user = models.CharField(max_length=255, db_index=True)
    state = models.CharField(max_length=32, db_index=True)
    account = models.CharField(max_length=255, blank=True)
    partition = models.TextField(blank=True)
    qos = models.CharField(max_length=255, blank=True)
    reason = models.TextField(blank=True)
    priority = models.BigIntegerField(default=0)
    submitted_at = models.DateTimeField(null=True, blank=True)
    started_at = models.DateTimeField(null=True, blank=True)
    starts_at = models.DateTimeField(null=True, blank=True, help_text="The scheduler's estimate for a pending job.")
    ends_at = models.DateTimeField(null=True, blank=True)
    time_limit_s = models.BigIntegerField(null=True, blank=True)
    nodes = Names(default=list, blank=True)
    node_count = models.IntegerField(default=1)
    cpus = models.IntegerField(default=0)
    gpus = models.IntegerField(default=0)
    gpu_type = models.CharField(max_length=255, blank=True)
    gpus_by_type = models.JSONField(default=dict, blank=True, help_text="Counts by type, if it requests several.")
    memory_mib = models.BigIntegerField(default=0)
    gpu_indices = models.JSONField(default=dict, blank=True, help_text="Lists of indices by node.")
    tasks = models.BigIntegerField(default=1)
    reservation = models.CharField(max_length=255, blank=True)
    features = models.TextField(blank=True)
    dependency = models.TextField(blank=True)
    licenses = models.TextField(blank=True)
    restart_count = models.IntegerField(default=0)

    objects = FactQuerySet.as_manager()

    class Meta:
        ordering = ("-priority", "id")

    def __str__(self) -> str:
        return f"{self.scheduler_id} {self.name}"

    @property
    def gpu_text(self) -> str:
        """Return the type of GPU that it requests; "1 a100, 2 1g.10gb" if it requests several types."""
        return ", ".join(f"{count} {kind}" for kind, count in self.gpus_by_type.items()) or self.gpu_type


class Reading(models.Model):
    """The last time that a part of the cluster was read, and the error if that failed."""

    class Part(models.TextChoices):
        NODES = "nodes"
        QUEUE = "queue"
        PARTITIONS = "partitions"
        RESERVATIONS = "reservations"
        ACCOUNTS = "accounts"
        LICENSES = "licenses", "Licences"
        CLOCK = "clock", "Clock readings"

    part = models.CharField(max_length=16, primary_key=True, choices=Part.choices)
    asked_at = models.DateTimeField(null=True, blank=True, help_text="Last poll; null: due now.")
    read_at = models.DateTimeField(null=True, blank=True, help_text="Time of the data.")
    error = models.TextField(blank=True, help_text="Error of the last poll; empty: it succeeded.")
    failing_since = models.DateTimeField(null=True, blank=True)
    unreadable = models.IntegerField(default=0, help_text="Number of unreadable records in the last answer.")
    clock_offset_s = models.FloatField(
        null=True, blank=True, help_text="Seconds by which the follow worker's clock is ahead of the scheduler's."
    )

    def __str__(self) -> str:
        return self.part

    @property
    def unreadable_text(self) -> str:
        """Return "1 job could not be read and is left out."; "" where everything was read.

        Nodes stay as they were last reported.
        """
        if not self.unreadable:
            return ""
        are = "is" if self.unreadable == 1 else "are"
        records = formatting.plain_spaces(formatting.plural(self.unreadable, _RECORDS[self.part]))
        kept = ", or shown as last reported" if self.part == Reading.Part.NODES else ""
        return f"{records} could not be read and {are} left out{kept}."


_RECORDS: dict[str, str] = {
    Reading.Part.NODES: "node",
    Reading.Part.QUEUE: "job",
    Reading.Part.PARTITIONS: "partition",
    Reading.Part.RESERVATIONS: "reservation",
    Reading.Part.ACCOUNTS: "account record",
    Reading.Part.LICENSES: "license",
}
