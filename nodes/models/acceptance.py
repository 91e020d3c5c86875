"""Store acceptances of rented or new clusters: the burn-in they rest on, and the outcome clause by clause."""

from __future__ import annotations

from typing import Self

from django.conf import settings
from django.db import models
from django.db.models import Q

from nodes.acceptance import clauses
from nodes.models.burnin import BurnIn


class AcceptanceQuerySet(models.QuerySet["Acceptance"]):
    def active(self) -> Self:
        """Select acceptances without a result."""
        return self.filter(result="")


class Acceptance(models.Model):
    """An acceptance of some nodes. It is over once its burn-in is, and has a result then."""

    class Result(models.TextChoices):
        RUNNING = "", "running"
        ACCEPTED = clauses.ACCEPTED
        REJECTED = clauses.REJECTED
        INCONCLUSIVE = clauses.INCONCLUSIVE

    burn_in = models.OneToOneField(BurnIn, models.PROTECT, related_name="acceptance")
    expression = models.CharField(max_length=2_000, help_text="The nodes as they were requested.")
    node_count = models.IntegerField()
    gpu_count = models.IntegerField(help_text="GPUs that the scheduler has on these nodes.")
    started_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    requested_at = models.DateTimeField(auto_now_add=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    result = models.CharField(max_length=16, choices=Result.choices, default=Result.RUNNING, blank=True)
    summary = models.TextField(blank=True, help_text="The outcome in a sentence.")
    clauses = models.JSONField(
        default=list, blank=True, help_text="Each clause: requirement, source, what was measured."
    )
    peaks = models.JSONField(default=dict, blank=True, editable=False, help_text="By GPU, what was observed at work.")
    observed_at = models.DateTimeField(null=True, blank=True)

    objects = AcceptanceQuerySet.as_manager()

    class Meta:
        ordering = ("-id",)
        indexes = (models.Index(fields=["id"], condition=Q(result=""), name="acceptances_to_advance"),)

    def __str__(self) -> str:
        return f"acceptance {self.pk}"

    @property
    def is_active(self) -> bool:
        return not self.result
