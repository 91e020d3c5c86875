"""Store burn-ins: what was requested and how far it is, each node's results and verdict, and the golden records."""

from __future__ import annotations

from dataclasses import fields
from datetime import datetime
from typing import Self

from django.conf import settings
from django.db import models
from django.db.models import Q

from nodes.burnin.evidence import GoldenKey
from nodes.burnin.reports import BurnInMachine, ItemSummary
from nodes.models.orders import NodeOrder


class BurnInQuerySet(models.QuerySet["BurnIn"]):
    def active(self) -> Self:
        """Select burn-ins that are not over."""
        return self.exclude(state=BurnIn.BurnInState.ENDED)

    def with_tests_left(self) -> Self:
        """Select burn-ins whose tests are still to come, or run."""
        states = BurnIn.BurnInState
        return self.filter(state__in=(states.WAITING, states.STARTING, states.RUNNING), job_ended_at=None)


class BurnIn(models.Model):
    """A test of some nodes, from the request until they are in service again or drained.

    `waiting`: reserved as soon as the scheduler answers, until no job runs on its nodes. `starting`: nodes are
    undrained inside the reservation, and the tests submitted. `running`. `returning`: judged; nodes are drained or stay
    in service, and the reservation is removed. `ended`.
    """

    class BurnInState(models.TextChoices):
        WAITING = "waiting"
        STARTING = "starting"
        RUNNING = "running"
        RETURNING = "returning", "returning nodes"
        ENDED = "ended"

    key = models.CharField(max_length=32, unique=True, help_text="Its name for the scheduler.")
    state = models.CharField(max_length=16, choices=BurnInState.choices, default=BurnInState.WAITING)
    seconds = models.IntegerField(help_text="How long the tests last.")
    may_undrain = models.BooleanField(default=False, help_text="Nodes that a person drained may return to service.")
    started_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    requested_at = models.DateTimeField(auto_now_add=True)
    detail = models.TextField(blank=True, help_text="What it waits for, or the scheduler's last error.")
    tried_at = models.DateTimeField(
        null=True, blank=True, help_text="Last call to the scheduler that failed, or that cancelled the tests."
    )
    unknown_since = models.DateTimeField(
        null=True, blank=True, help_text="Since when the scheduler does not know the job, or its state."
    )
    reserved_at = models.DateTimeField(null=True, blank=True)
    submitting_at = models.DateTimeField(null=True, blank=True)
    scheduler_id = models.CharField(max_length=64, blank=True)
    directory = models.CharField(max_length=255, blank=True)
    started_at = models.DateTimeField(null=True, blank=True, help_text="When the scheduler started the tests.")
    job_ended_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    cancel_requested_at = models.DateTimeField(null=True, blank=True)
    cancel_requested_by = models.ForeignKey(
        settings.AUTH_USER_MODEL, models.SET_NULL, null=True, blank=True, related_name="+"
    )
    problem = models.TextField(blank=True, help_text="Why it ended early.")
    log = models.TextField(blank=True, help_text="The end of what the tests printed.")

    objects = BurnInQuerySet.as_manager()

    class Meta:
        ordering = ("-id",)
        verbose_name = "burn-in"
        indexes = (models.Index(fields=["id"], condition=~Q(state="ended"), name="burn_ins_to_advance"),)

    def __str__(self) -> str:
        return f"burn-in {self.pk}"

    @property
    def is_active(self) -> bool:
        return self.state != self.BurnInState.ENDED

    @property
    def is_cancellable(self) -> bool:
        """Return whether its tests are still to come, or run, and nobody has cancelled them."""
        is_before_end = self.is_active and self.state != self.BurnInState.RETURNING and self.job_ended_at is None
        return is_before_end and self.cancel_requested_at is None

    @property
    def tests_began_at(self) -> datetime:
        """Return since when evidence can come from the tests.

        Slurm rounds a job's start down to seconds, so what was seen just before the tests would seem to come from them.
        """
        return max(filter(None, (self.started_at, self.submitting_at, self.requested_at)))

    @property
    def reservation(self) -> str:
        """Return the reservation's name in the scheduler."""
        # The time makes it unique: another portal, or a restored database, may give a number a second time.
        return f"vigil_burnin_{self.pk}_{int(self.requested_at.timestamp())}"


class BurnInNode(models.Model):
    """Stores one node of a burn-in. `is_active` as long as the burn-in is: a node is in one at a time."""

    burn_in = models.ForeignKey(BurnIn, models.CASCADE, related_name="nodes")
    node = models.CharField(max_length=255)
    is_active = models.BooleanField(default=True)
    gpus = models.IntegerField(default=0, help_text="GPUs that the scheduler has there.")
    was_drained = models.BooleanField(default=False)
    was_drained_by_person = models.BooleanField(
        default=False, help_text="It was drained, and not by one of Vigil's health rules."
    )
    earlier_reason = models.TextField(blank=True)
    undrain_order = models.ForeignKey(NodeOrder, models.SET_NULL, null=True, blank=True, related_name="+")
    return_order = models.ForeignKey(NodeOrder, models.SET_NULL, null=True, blank=True, related_name="+")
    is_returned = models.BooleanField(default=False, help_text="What follows from the verdict was ordered.")
    is_lost = models.BooleanField(default=False, db_default=False, help_text="The node failed while the tests ran.")
    outcome = models.CharField(max_length=300, blank=True, help_text="What became of the node.")
    verdict = models.CharField(max_length=16, blank=True)
    findings = models.JSONField(default=list, blank=True, help_text="Sentences: text, and whether it is a warning.")
    machine = models.JSONField(default=dict, blank=True, help_text="GPUs, driver and software as the tests found them.")
    read_bytes = models.BigIntegerField(default=0, help_text="How much of its results is stored.")
    has_ended = models.BooleanField(default=False, help_text="Its tests ran to their end.")
    last_result_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ("node",)
        verbose_name = "node of a burn-in"
        constraints = (
            models.UniqueConstraint(fields=["burn_in", "node"], name="one_row_a_burn_in_and_node"),
            models.UniqueConstraint(fields=["node"], condition=Q(is_active=True), name="one_active_burn_in_a_node"),
        )
        indexes = (models.Index(fields=["node", "-id"], name="burn_ins_of_a_node"),)

    def __str__(self) -> str:
        return f"{self.node} in burn-in {self.burn_in_id}"

    @property
    def tested_machine(self) -> BurnInMachine | None:
        # A newer version of Vigil may have stored more.
        known = {field.name: self.machine[field.name] for field in fields(BurnInMachine) if field.name in self.machine}
        return BurnInMachine(**known) if known else None


class BurnInTest(models.Model):
    """Sums up all results of one test of one item of a node; see `ItemSummary`, whose columns it has."""

    burn_in_node = models.ForeignKey(BurnInNode, models.CASCADE, related_name="tests")
    test = models.CharField(max_length=32)
    item = models.CharField(max_length=200)
    unit = models.CharField(max_length=16, blank=True)
    basis = models.CharField(max_length=300, blank=True)
    count = models.IntegerField(default=0)
    failures = models.IntegerField(default=0)
    absences = models.IntegerField(default=0)
    values = models.JSONField(default=list, blank=True)
    digests = models.JSONField(default=list, blank=True)
    detail = models.CharField(max_length=300, blank=True)

    class Meta:
        ordering = ("id",)
        verbose_name = "test of a burn-in"
        constraints = (
            models.UniqueConstraint(fields=["burn_in_node", "test", "item"], name="one_row_a_test_and_item"),
        )

    def __str__(self) -> str:
        return f"{self.test} {self.item}"

    def summary(self) -> ItemSummary:
        return ItemSummary(
            self.test, self.item, self.unit, self.basis, self.count, self.failures, self.absences, list(self.values),
            list(self.digests), self.detail,
        )  # fmt: skip


class GoldenRecord(models.Model):
    """Keeps what passed burn-ins of one model and driver measured: the newest medians, and the digest that all had."""

    model = models.CharField(max_length=128)
    driver = models.CharField(max_length=40, blank=True)
    test = models.CharField(max_length=32)
    kind = models.CharField(max_length=200)
    basis = models.CharField(max_length=300, blank=True)
    unit = models.CharField(max_length=16, blank=True)
    values = models.JSONField(default=list, blank=True)
    digest = models.CharField(max_length=64, blank=True)
    count = models.IntegerField(default=0, help_text="Passed burn-ins of nodes that it is made of.")
    updated_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ("model", "driver", "test", "kind")
        verbose_name = "golden record"
        constraints = (
            models.UniqueConstraint(fields=["model", "driver", "test", "kind", "basis"], name="one_golden_record"),
        )

    def __str__(self) -> str:
        return f"{self.model} {self.driver}: {self.test} {self.kind}"

    @property
    def key(self) -> GoldenKey:
        return GoldenKey(self.model, self.driver, self.test, self.kind, self.basis)
