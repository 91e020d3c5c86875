"""Store orders to drain and undrain nodes, and say in words who gave one and what became of it."""

from __future__ import annotations

from typing import Self

from django.conf import settings
from django.db import models
from django.db.models import Exists, OuterRef, Q

from nodes.health.requesters import BURN_IN, MAINTENANCE_PREFIX, SPARE, is_health_rule

_BY_HEALTH_RULES = ~Q(rule="") & ~Q(rule__in=(SPARE, BURN_IN)) & ~Q(rule__startswith=MAINTENANCE_PREFIX)


class NodeOrderQuerySet(models.QuerySet["NodeOrder"]):
    def open(self) -> Self:
        return self.filter(state=NodeOrder.State.ASKED)

    def by_health_rules(self) -> Self:
        """Select what Vigil ordered for a finding: no orders of persons, maintenance, hot spares or burn-ins."""
        # One condition each: the first is that of the indexes.
        return self.exclude(rule="").exclude(rule__in=(SPARE, BURN_IN)).exclude(rule__startswith=MAINTENANCE_PREFIX)

    def for_findings(self) -> Self:
        """Select what Vigil ordered for a finding, or a person who approved what a rule proposed."""
        approved = NodeOrder.objects.filter(pk=OuterRef("pk"), health_entries__isnull=False)
        return self.filter(_BY_HEALTH_RULES | (Q(rule="") & Exists(approved)))


class NodeOrder(models.Model):
    """An order for a node by a sysadmin or a health rule, which the next tick carries out."""

    class Action(models.TextChoices):
        DRAIN = "drain"
        UNDRAIN = "undrain"

    class State(models.TextChoices):
        ASKED = "asked"
        DONE = "done"
        REFUSED = "refused"
        REPLACED = "replaced", "replaced by a later one"

    node = models.CharField(max_length=255)
    action = models.CharField(max_length=16, choices=Action.choices)
    reason = models.TextField(blank=True)
    asked_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    rule = models.CharField(max_length=64, blank=True, help_text="The health rule that Vigil followed by itself.")
    is_planted = models.BooleanField(default=False, help_text="It follows a finding that a game day planted.")
    asked_at = models.DateTimeField(auto_now_add=True)
    state = models.CharField(max_length=16, choices=State.choices, default=State.ASKED)
    replaces = models.TextField(blank=True, help_text="The node's reason at the time of the request.")
    outcome = models.TextField(
        blank=True, help_text="The scheduler's message: why it refused the order or has not answered yet."
    )
    tried_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)

    objects = NodeOrderQuerySet.as_manager()

    class Meta:
        ordering = ("-id",)
        indexes = (
            models.Index(fields=["node", "-id"], name="orders_of_a_node"),
            models.Index(fields=["-id"], condition=~Q(rule=""), name="orders_by_rules"),
            models.Index(fields=["asked_at"], condition=~Q(rule=""), name="orders_by_rules_since"),
        )
        constraints = (
            models.UniqueConstraint(fields=["node"], condition=Q(state="asked"), name="one_open_order_a_node"),
        )

    def __str__(self) -> str:
        return f"{self.action} {self.node}"

    @property
    def is_open(self) -> bool:
        return self.state == self.State.ASKED

    @property
    def is_for_finding(self) -> bool:
        """Return whether it follows a finding, as `for_findings` selects orders."""
        if self.rule:
            return is_health_rule(self.rule)
        return self.health_entries.exists()

    @property
    def reason_with_requester(self) -> str:
        """Return the reason with the requester appended, whom the scheduler does not know."""
        return f"{self.reason} (vigil: {self.requester})"

    @property
    def requester(self) -> str:
        """Return who gave the order: a person's name, or the health rule's."""
        return self.rule or (self.asked_by.username if self.asked_by else "unknown")

    @property
    def origin_text(self) -> str:
        """Return who or what gave the order: "by ops", "by the health rule off-bus", "by Vigil for maintenance 4"."""
        if not self.rule:
            return f"by {self.asked_by.username if self.asked_by else 'a deleted user'}"
        if self.rule.startswith(MAINTENANCE_PREFIX):
            return f"by Vigil for maintenance {self.rule.removeprefix(MAINTENANCE_PREFIX)}"
        return {SPARE: "by Vigil for hot spares", BURN_IN: "by Vigil for a burn-in"}.get(
            self.rule, f"by the health rule {self.rule}"
        )

    @property
    def outcome_text(self) -> str:
        """Return in a sentence what became of it: "Done.", "Refused: Invalid node name specified."."""
        outcome = f"{self.outcome.rstrip('.')}." if self.outcome else ""
        if self.state == self.State.ASKED:
            return f"{outcome} Retrying." if outcome else "Sent to the scheduler within seconds."
        if self.state == self.State.REFUSED:
            return f"Refused: {outcome or 'no reason given.'}"
        return "Done." if self.state == self.State.DONE else "Replaced by a later order."
