"""An attempt: one submission of a job to the scheduler, with the streams and events that it reported."""

from __future__ import annotations

import secrets
from typing import Self

from django.conf import settings
from django.db import models

from jobs.models.job import Job
from nodes.schedulers.base import ALIVE


def _new_key() -> str:
    return secrets.token_hex(8)


class AttemptQuerySet(models.QuerySet["Attempt"]):
    def alive(self) -> Self:
        """Return attempts that have not ended as far as is known: the follower polls the scheduler for these."""
        return self.filter(ended_at=None)

    def open(self) -> Self:
        """Return attempts that still accept reports."""
        return self.filter(closed_at=None)

    def confirmed(self) -> Self:
        """Exclude attached attempts that the scheduler has not confirmed yet."""
        return self.exclude(job__kind=Job.ATTACHED, submitted_at=None)

    def with_job(self) -> Self:
        """Join the job without its long texts: they may be 20 KB each, and are read when somebody needs them."""
        return self.select_related("job").defer("job__spec", "job__spec_toml", "job__notes")

    def for_reports(self) -> Self:
        """Lock attempts, with what an intake reads and writes, and the job that they are published under."""
        where = ("number", "state", "step", "steps", "phase", "incarnation", "latest", "version")
        pace = ("pace_seconds", "pace_steps", "last_report_at")
        rows = self.select_for_update(of=("self",)).select_related("job")
        return rows.only(*where, *pace, "job__project_id", "job__kind")


class Attempt(models.Model):
    """A submission of a job to the scheduler. States are Slurm's own words, lower-case."""

    class State(models.TextChoices):
        PENDING = "pending"
        RUNNING = "running"
        SUSPENDED = "suspended"
        COMPLETING = "completing"
        COMPLETED = "completed"
        CANCELLED = "cancelled"
        FAILED = "failed"
        TIMEOUT = "timeout"
        NODE_FAIL = "node_fail"
        PREEMPTED = "preempted"
        OUT_OF_MEMORY = "out_of_memory"
        BOOT_FAIL = "boot_fail"
        DEADLINE = "deadline"
        REQUEUED = "requeued"

    class Origin(models.TextChoices):
        SUBMITTED = "submitted"
        RESTARTED = "restarted", "restarted by Vigil"
        REQUEUED = "requeued", "requeued by the scheduler"
        RESUMED = "resumed", "resumed by a person"

    ALIVE = ALIVE
    ENDED_BADLY = frozenset({"failed", "timeout", "node_fail", "out_of_memory", "boot_fail", "deadline"})

    job = models.ForeignKey(Job, models.CASCADE, related_name="attempts")
    number = models.PositiveIntegerField()
    origin = models.CharField(max_length=16, choices=Origin.choices, default=Origin.SUBMITTED)
    key = models.CharField(
        max_length=16, unique=True, default=_new_key, help_text="Part of the job's name and comment in the scheduler."
    )
    state = models.CharField(max_length=16, choices=State.choices, default=State.PENDING, db_index=True)
    reason = models.TextField(
        blank=True, help_text="Why it waits or ended, as reported by the scheduler or decided by Vigil."
    )

    # The scheduler's side. `submitting_at` is set before the submission, so that an unknown outcome is searched for.
    scheduler_id = models.CharField(max_length=64, blank=True, db_index=True)
    scheduler_user = models.CharField(
        max_length=64,
        blank=True,
        help_text="Unix user under which it was submitted.",
    )
    scheduler_restart_count = models.PositiveIntegerField(default=0)
    submitting_at = models.DateTimeField(null=True, blank=True)
    unknown_since = models.DateTimeField(
        null=True,
        blank=True,
        help_text="Since when the scheduler's answers have not included it; null: they include it.",
    )
    untold_since = models.DateTimeField(
        null=True, blank=True, help_text="Since when the scheduler has not reported its state."
    )
    nodes = models.JSONField(default=list, blank=True)
    exit_code = models.IntegerField(null=True, blank=True)
    cause = models.CharField(
        max_length=32,
        blank=True,
        help_text="Why it ended, in one word: completed, stopped, exception …",
    )
    failure = models.JSONField(
        default=dict,
        blank=True,
        help_text="The launcher's first failure: rank, incarnation, exit_code, signal, kind, error.",
    )
    signal = models.PositiveIntegerField(null=True, blank=True)
    slurm_steps = models.JSONField(
        default=list, blank=True, help_text="Its Slurm steps according to accounting: number, name, exit_code, signal …"
    )
    slurm_steps_at = models.DateTimeField(null=True, blank=True, help_text="When they were received, or given up on.")
    created_at = models.DateTimeField(auto_now_add=True)
    submitted_at = models.DateTimeField(null=True, blank=True)
    started_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    closed_at = models.DateTimeField(
        null=True, blank=True, help_text="Since when no reports are accepted and its token is invalid."
    )
    is_counted = models.BooleanField(default=False, help_text="Its allocated time is included in the sums.")

    # A cancellation is advanced by the follower: requested → signalled → killed, or at once if a kill is requested.
    cancel_asked_at = models.DateTimeField(null=True, blank=True)
    cancel_asked_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, blank=True, related_name="+"
    )
    cancel_signalled_at = models.DateTimeField(null=True, blank=True)
    cancel_killed_at = models.DateTimeField(null=True, blank=True)
    kill_requested_at = models.DateTimeField(
        null=True, blank=True, help_text="When a kill without a last checkpoint was requested."
    )
    kill_requested_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, blank=True, related_name="+"
    )

    release_requested_at = models.DateTimeField(
        null=True, blank=True, help_text="When its release from a hold was requested."
    )
    release_requested_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, blank=True, related_name="+"
    )
    release_outcome = models.TextField(blank=True, help_text="The scheduler's reason for not releasing it.")

    # After the end: what Vigil decided. A row that ended and has no decision is found by the next tick.
    collecting_since = models.DateTimeField(
        null=True, blank=True, help_text="When its spools were first read after its end."
    )
    collected_at = models.DateTimeField(null=True, blank=True, help_text="When its spools were last read completely.")
    spools_removed_at = models.DateTimeField(null=True, blank=True)
    decided_at = models.DateTimeField(null=True, blank=True)
    decision = models.TextField(
        blank=True, help_text="What Vigil decided, in a sentence: restarted as which attempt, or why not."
    )
    decided_version = models.PositiveIntegerField(
        default=0, help_text="Version of the verdict behind the decision; 0: decided by exit code and state only."
    )
    blamed_nodes = models.JSONField(
        default=list, blank=True, help_text="Nodes that the job's next attempts avoid for a day."
    )

    # Where it starts, and how far it is according to the trainer.
    resume_from = models.ForeignKey("Checkpoint", models.SET_NULL, null=True, blank=True, related_name="resumed_by")
    starts_back = models.BooleanField(
        default=False, help_text="Vigil chose an older checkpoint than the newest to start from."
    )
    excluded_nodes = models.JSONField(
        default=list, blank=True, help_text="Nodes that it must avoid, in addition to those in its specification."
    )
    directory = models.CharField(max_length=64, blank=True, help_text="attempt-K, once its launcher has created it.")
    step = models.BigIntegerField(null=True, blank=True)
    steps = models.BigIntegerField(null=True, blank=True)
    phase = models.CharField(max_length=32, blank=True)
    pace_seconds = models.FloatField(default=0.0, help_text="Decaying sum of elapsed time over the last minutes.")
    pace_steps = models.FloatField(
        default=0.0, help_text="Decaying sum of steps completed in pace_seconds; their ratio is seconds per step."
    )
    incarnation = models.PositiveIntegerField(default=0)
    latest = models.JSONField(default=dict, help_text="Newest values of rank 0, shown in lists.")
    version = models.BigIntegerField(default=0, help_text="Incremented by every change that a page shows.")
    last_report_at = models.DateTimeField(null=True, blank=True)
    token_digest = models.CharField(max_length=64, blank=True, db_index=True)
    tailed = models.BooleanField(
        default=False, help_text="Its shippers do not post: the worker reads its spools as they grow."
    )

    objects = AttemptQuerySet.as_manager()

    class Meta:
        ordering = ("job_id", "number")
        constraints = (models.UniqueConstraint(fields=["job", "number"], name="one_attempt_a_number"),)
        indexes = (
            models.Index(fields=["ended_at", "state"], name="attempts_by_end"),
            # The few rows that every tick reads, of all that ever were.
            models.Index(fields=["id"], condition=models.Q(closed_at=None), name="attempts_open"),
            models.Index(fields=["ended_at"], condition=models.Q(slurm_steps_at=None), name="attempts_without_steps"),
            models.Index(fields=["started_at"], name="attempts_by_start"),
            models.Index(fields=["closed_at"], name="attempts_by_close"),
            models.Index(fields=["id"], condition=models.Q(is_counted=False), name="attempts_to_count"),
            models.Index(fields=["spools_removed_at"], name="attempts_by_removal"),
            models.Index(fields=["closed_at"], condition=models.Q(spools_removed_at=None), name="attempts_with_spools"),
        )

    def __str__(self) -> str:
        return f"#{self.job_id}.{self.number}"

    @property
    def is_alive(self) -> bool:
        return self.state in self.ALIVE

    @property
    def has_chosen_start(self) -> bool:
        """Return whether a person or Vigil chose its checkpoint: its launchers then do not take the newest."""
        return self.resume_from_id is not None and (self.starts_back or self.origin == Attempt.Origin.RESUMED)

    @property
    def rewinds(self) -> int:
        """Return how often its job diverged and was rewound, each time with half the learning rate."""
        rows = Attempt.objects.filter(job_id=self.job_id, number__lte=self.number).order_by("number")
        ends = list(rows.values_list("cause", "starts_back"))
        return sum(a[0] == "diverged" and b[1] for a, b in zip(ends, ends[1:], strict=False))

    @property
    def is_unconfirmed(self) -> bool:
        """Return whether its owner is unconfirmed (`vigil attach`): nothing is done to the scheduler's job yet."""
        return self.job.is_attached and self.submitted_at is None


class Stream(models.Model):
    """A process start of one rank (or launcher), whose reports are stored exactly once. `next_seq` is its cursor."""

    attempt = models.ForeignKey(Attempt, models.CASCADE, related_name="streams")
    uid = models.CharField(max_length=32)
    incarnation = models.PositiveIntegerField()
    rank = models.IntegerField(help_text="Negative: the launcher of node −rank−1.")
    node = models.CharField(max_length=255, blank=True)
    boot_id = models.CharField(max_length=64, blank=True)
    restart_count = models.PositiveIntegerField(default=0)
    next_seq = models.BigIntegerField(default=0)
    # Where on disk the line of a seq not beyond the cursor begins, so that collecting need not count lines again.
    place_seq = models.BigIntegerField(default=0)
    place_segment = models.PositiveIntegerField(default=0)
    place_offset = models.BigIntegerField(default=0, help_text="0: unknown.")
    quarantined = models.PositiveIntegerField(default=0)
    ended = models.BooleanField(default=False)

    class Meta:
        constraints = (models.UniqueConstraint(fields=["attempt", "uid"], name="one_row_a_stream"),)

    def __str__(self) -> str:
        return f"{self.incarnation}.{self.rank}.{self.uid}"


class Event(models.Model):
    """Something that happened in an attempt, as its ranks, its launcher or Vigil reported it."""

    attempt = models.ForeignKey(Attempt, models.CASCADE, related_name="events")
    time = models.DateTimeField()
    kind = models.CharField(max_length=64)
    rank = models.IntegerField(null=True, blank=True)
    incarnation = models.PositiveIntegerField(null=True, blank=True)
    data = models.JSONField(default=dict)

    class Meta:
        ordering = ("id",)
        indexes = (models.Index(fields=["attempt", "kind"], name="events_by_kind"),)

    def __str__(self) -> str:
        return self.kind
