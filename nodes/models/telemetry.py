"""Store what agents report: agents and their streams, GPUs and their slots, frames of samples, events.

The samples themselves become series (`portal.series`): a GPU's under ("gpu", pk), a machine's under ("node", pk of its
agent). Neither refers to a job.
"""

from __future__ import annotations

from collections.abc import Container
from datetime import datetime, timedelta
from typing import Self

from django.conf import settings
from django.db import models
from django.db.models import Count, F, OuterRef, Q, Subquery, Sum
from django.db.models.functions import Coalesce
from django.utils import timezone

from vigil_core import untrusted

SILENT = timedelta(seconds=45)  # three batches and some slack
RETIRED_AFTER = timedelta(days=7)
PLANTED_GRACE = timedelta(seconds=60)  # until the end of a planted fault is noticed and reported


class AgentQuerySet(models.QuerySet["Agent"]):
    def silent(self, now: datetime) -> Self:
        """Return agents that have reported before, but not for too long."""
        return self.filter(heard_at__lt=now - SILENT)

    def described(self) -> Self:
        """Defer long columns; annotate the number of GPUs and of discarded batches (`lost_batches`)."""
        lost = AgentStream.objects.filter(agent=OuterRef("pk")).values("agent").annotate(n=Sum("given_up")).values("n")
        return self.defer("facts", "newest", "processes").annotate(
            gpu_count=Count("gpus", filter=Q(gpus__gone_at=None)), lost_batches=Coalesce(Subquery(lost), 0)
        )


class Agent(models.Model):
    """A machine's reporting agent. The row stays if the scheduler forgets the node, because its series refer to it."""

    node = models.CharField(max_length=255, unique=True)
    token_digest = models.CharField(max_length=64, blank=True, editable=False)
    enrolled_at = models.DateTimeField(null=True, blank=True)
    enrolled_by = models.CharField(
        max_length=255, blank=True, help_text="A person, or the hint of an enrolment secret."
    )
    version = models.CharField(max_length=64, blank=True)
    boot_id = models.CharField(max_length=64, blank=True)
    kernel_seq = models.BigIntegerField(default=-1, help_text="Newest kernel log record of this boot that was counted.")
    stream = models.CharField(max_length=16, blank=True, help_text="Stream of the last report.")
    heard_at = models.DateTimeField(null=True, blank=True, help_text="Last report, by the portal's clock.")
    sampled_at = models.BigIntegerField(null=True, blank=True, help_text="Unix second of the newest sample.")
    # Progress markers: samples before these Unix seconds have been processed.
    merged_to = models.BigIntegerField(
        default=0, help_text="Unix second up to which samples are merged into chunks; 0: none yet."
    )
    minutes_to = models.BigIntegerField(default=0, help_text="Unix second up to which samples are thinned to minutes.")
    tens_to = models.BigIntegerField(default=0, help_text="Unix second up to which samples are thinned to ten minutes.")
    clock_offset_s = models.FloatField(null=True, blank=True, help_text="The agent's clock minus the portal's.")
    facts = models.JSONField(default=dict, blank=True)
    newest = models.JSONField(default=dict, blank=True, help_text="Newest values of the host, and by GPU UUID.")
    processes = models.JSONField(default=list, blank=True)
    plant = models.JSONField(
        default=dict, blank=True, editable=False, help_text="The fault that a game day wants planted: {}: none."
    )
    is_made_up = models.BooleanField(default=False, help_text="Created by `vigil up --demo`.")

    objects = AgentQuerySet.as_manager()

    class Meta:
        ordering = ("node",)

    def __str__(self) -> str:
        return self.node

    def is_silent(self, now: datetime | None = None) -> bool:
        return self.heard_at is None or self.heard_at < (now or timezone.now()) - SILENT

    def is_retired(self, now: datetime, nodes: Container[str]) -> bool:
        """Return whether its node was taken away: silent for long, and unknown to the scheduler, which has `nodes`."""
        return self.heard_at is not None and self.heard_at < now - RETIRED_AFTER and self.node not in nodes


class AgentStream(models.Model):
    """A buffer folder of an agent, and how much of it the portal has stored (docs/reference/protocols.md §11)."""

    agent = models.ForeignKey(Agent, models.CASCADE, related_name="streams")
    uid = models.CharField(max_length=16)
    next_seq = models.BigIntegerField(default=0)
    given_up = models.BigIntegerField(default=0, help_text="Batches that the agent discarded for lack of space.")
    began_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = (models.UniqueConstraint(fields=["agent", "uid"], name="one_stream_an_agent_and_id"),)

    def __str__(self) -> str:
        return f"{self.agent_id}.{self.uid}"


class EnrolmentSecret(models.Model):
    """A secret with which agents obtain tokens, once per name. It is shown once; only its digest is stored."""

    hint = models.CharField(max_length=12)
    digest = models.CharField(max_length=64, unique=True, editable=False)
    made_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    made_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    revoked_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ("-made_at",)

    def __str__(self) -> str:
        return f"{self.hint}…"


class Gpu(models.Model):
    """A GPU, identified by its UUID; its slot is where it was last seen."""

    uuid = models.CharField(max_length=96, unique=True)
    agent = models.ForeignKey(Agent, models.CASCADE, related_name="gpus")
    index = models.IntegerField(help_text="NVML's index.")
    minor = models.IntegerField(null=True, blank=True, help_text="N of /dev/nvidiaN.")
    bus = models.CharField(max_length=32, blank=True)
    model = models.CharField(max_length=128, blank=True)
    memory_mib = models.BigIntegerField(null=True, blank=True)
    power_cap_watts = models.IntegerField(null=True, blank=True)
    slowdown_c = models.IntegerField(null=True, blank=True)
    facts = models.JSONField(default=dict, blank=True)
    has_mig = models.BooleanField(default=False, db_default=False, help_text="It is cut into MIG slices.")
    counters = models.JSONField(default=dict, blank=True, help_text="Slow counters as last reported.")
    counted_at = models.DateTimeField(null=True, blank=True)
    fault = models.CharField(
        max_length=200, blank=True, help_text="Most serious fault that its counters show (gpus.health), in words."
    )
    first_seen_at = models.DateTimeField(default=timezone.now)
    gone_at = models.DateTimeField(null=True, blank=True, help_text="Since when its node no longer reports it.")
    lost_at = models.DateTimeField(null=True, blank=True, help_text="Since when it has been off the bus.")

    class Meta:
        ordering = ("agent", "index")
        indexes = (models.Index(fields=["agent"], condition=Q(has_mig=True), name="gpus_with_mig"),)

    def __str__(self) -> str:
        return self.uuid


class GpuPlace(models.Model):
    """The slot that a GPU was in, and until when."""

    gpu = models.ForeignKey(Gpu, models.CASCADE, related_name="places")
    agent = models.ForeignKey(Agent, models.CASCADE, related_name="+")
    index = models.IntegerField()
    since = models.DateTimeField()
    until = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ("since",)
        constraints = (models.UniqueConstraint(fields=["gpu"], condition=Q(until=None), name="one_place_a_gpu"),)

    def __str__(self) -> str:
        return f"{self.gpu_id} on {self.agent_id}"


class HoldingQuerySet(models.QuerySet["Holding"]):
    def between(self, start: datetime, end: datetime) -> Self:
        """Return the allocations that overlap this time span."""
        return self.filter(Q(until=None) | Q(until__gt=start), since__lt=end)


class Holding(models.Model):
    """A period in which one of the scheduler's jobs, Vigil's or not, has a GPU allocated."""

    class Source(models.TextChoices):
        """The sources of claims, from the least to the most reliable."""

        PROCESSES = "processes", "its processes' control groups"
        SCHEDULER = "scheduler", "the scheduler's indices"
        LAUNCHER = "launcher", "its launcher"

    gpu = models.ForeignKey(Gpu, models.CASCADE, related_name="holdings", db_index=False)
    agent = models.ForeignKey(Agent, models.CASCADE, related_name="holdings", db_index=False)
    scheduler_id = models.CharField(max_length=64, db_index=True)
    user = models.CharField(max_length=255, blank=True)
    name = models.CharField(max_length=255, blank=True, help_text="The job's name in the scheduler's queue.")
    source = models.CharField(max_length=16, choices=Source.choices)
    since = models.DateTimeField()
    until = models.DateTimeField(null=True, blank=True)
    is_made_up = models.BooleanField(default=False, help_text="Created by `vigil up --demo`.")

    objects = HoldingQuerySet.as_manager()

    class Meta:
        ordering = ("since",)
        constraints = (
            models.UniqueConstraint(fields=["gpu", "scheduler_id"], condition=Q(until=None), name="held_once_by_a_job"),
        )
        indexes = (
            models.Index(fields=["gpu", "since"], name="holdings_of_a_gpu"),
            models.Index(fields=["agent", "since"], name="holdings_of_a_machine"),
            models.Index(fields=["until", "since"], name="holdings_by_end"),
        )

    def __str__(self) -> str:
        return f"{self.gpu_id} by {self.scheduler_id}"


class GpuUse(models.Model):
    """The use of one job's GPUs on one day (UTC), in sampled GPU-seconds."""

    day = models.DateField()
    scheduler_id = models.CharField(max_length=64)
    user = models.CharField(max_length=255, blank=True)
    held_s = models.FloatField(default=0, help_text="Allocated GPU-seconds, as far as sampled.")
    used_s = models.FloatField(default=0, help_text="Allocated GPU-seconds times utilisation.")
    idle_s = models.FloatField(default=0, help_text="Allocated GPU-seconds without any activity.")
    is_made_up = models.BooleanField(default=False, help_text="Created by `vigil up --demo`.")
    # Set by jobs.waste.aggregation, which knows jobs and people.
    job = models.BigIntegerField(null=True, blank=True, help_text="Vigil's job number; null: not a Vigil job.")
    project = models.ForeignKey(
        "portal.Project", models.SET_NULL, null=True, blank=True, related_name="+", db_index=False
    )
    person = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, blank=True, related_name="+", db_index=False
    )
    is_added = models.BooleanField(default=False, help_text="The day's sums include its current values.")

    class Meta:
        ordering = ("day",)
        constraints = (models.UniqueConstraint(fields=["day", "scheduler_id"], name="one_use_a_job_and_day"),)
        indexes = (
            models.Index(fields=["day"], condition=Q(is_added=False), name="uses_to_add"),
            models.Index(fields=["scheduler_id", "day"], name="uses_of_a_job"),
        )

    def __str__(self) -> str:
        return f"{self.scheduler_id} on {self.day}"


class Frame(models.Model):
    """A batch of samples as received (`nodes.telemetry.frames`), until it is merged into chunks of each series."""

    agent = models.ForeignKey(Agent, models.CASCADE, related_name="frames", db_index=False)
    at = models.BigIntegerField(help_text="Unix second of the first sample.")
    until = models.BigIntegerField(help_text="Unix second after the last one.")
    data = models.BinaryField()

    class Meta:
        indexes = (models.Index(fields=["agent", "at"], name="frames_of_a_machine"),)

    def __str__(self) -> str:
        return f"{self.agent_id} from {self.at}"


class NodeEvent(models.Model):
    """An event of a machine: an Xid, a lost GPU, a slow mount. Equal events close in time are one row."""

    agent = models.ForeignKey(Agent, models.CASCADE, related_name="events", db_index=False)
    gpu = models.ForeignKey(Gpu, models.SET_NULL, null=True, blank=True, related_name="events", db_index=False)
    kind = models.CharField(max_length=32)
    code = models.IntegerField(null=True, blank=True, help_text="The number of an Xid, SXid or planted fault.")
    text = models.TextField(blank=True)
    at = models.DateTimeField()
    last_at = models.DateTimeField(help_text="When it was last reported; for lasting events, when it ended.")
    is_open = models.BooleanField(default=False, help_text="It is still ongoing.")
    count = models.BigIntegerField(default=1)
    is_confirmed = models.BooleanField(default=False, help_text="Reported by both kernel log and NVML.")
    boot_id = models.CharField(max_length=64, blank=True)
    first_seq = models.BigIntegerField(
        null=True, blank=True, help_text="First kernel log record; null: not from the kernel log."
    )
    last_seq = models.BigIntegerField(null=True, blank=True)
    fingerprint = models.CharField(max_length=32, blank=True, editable=False)
    data = models.JSONField(default=dict, blank=True)
    judged = models.BigIntegerField(default=0, help_text="How much of its count health rules have taken into account.")

    class Meta:
        ordering = ("-at", "-id")
        indexes = (
            models.Index(fields=["id"], condition=Q(judged__lt=F("count")), name="events_to_judge"),
            models.Index(fields=["agent", "-at"], name="events_of_a_machine"),
            models.Index(fields=["gpu", "-at"], name="events_of_a_gpu"),
            models.Index(fields=["kind", "-at"], name="events_of_a_kind"),
            models.Index(fields=["agent", "fingerprint", "-last_at"], name="events_alike"),
            models.Index(fields=["kind", "at"], condition=Q(is_open=True), name="events_open"),
            # Metrics sum all Xids at each scrape: the index has all that this needs.
            models.Index(fields=["kind", "agent", "gpu", "code", "count"], name="events_counted"),
        )

    def __str__(self) -> str:
        return f"{self.kind} {self.code or ''} of {self.agent_id}".replace("  ", " ")

    @property
    def planted(self) -> int | None:
        """Return the number of the game day's fault that caused it. What lasts longer than that was planted is real."""
        data = self.data if isinstance(self.data, dict) else {}
        until = untrusted.moment(data.get("planted_until"))
        if until is None or (timezone.now() if self.is_open else self.last_at) > until + PLANTED_GRACE:
            return None
        return untrusted.count(data.get("planted"))

    @property
    def is_planted(self) -> bool:
        return self.planted is not None
