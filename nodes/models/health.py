"""Store what health rules found, what became of it, and how far Vigil may act by itself."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import NamedTuple, Self

from django.conf import settings
from django.db import models
from django.db.models import Q

from nodes.health.rules.rule import OUT_OF_SERVICE, SEVERITIES
from nodes.models.orders import NodeOrder
from nodes.models.telemetry import Agent, Gpu
from portal.access import sees_all
from portal.models import User
from vigil_core import untrusted

PEOPLE = frozenset({"user", "program"})
"""Fields of evidence that only sysadmins see: whose program had the GPU."""
KERNEL_TEXT = frozenset({"text"})
"""Fields with a line of the kernel's log, which may name somebody else's process."""


def hidden_fields(user: User) -> frozenset[str]:
    """Return the fields of evidence that this person may not see."""
    if user.is_sysadmin:
        return frozenset()
    return PEOPLE if sees_all(user) else PEOPLE | KERNEL_TEXT


class EntryObservation(NamedTuple):
    """Describes one observation among an entry's evidence: equal events, or a state with its newest values."""

    at: float
    signal: str
    fields: dict[str, bool | int | float | str]
    number: int


class HealthEntryQuerySet(models.QuerySet["HealthEntry"]):
    def active(self) -> Self:
        """Select what is not over: watched, open, and dismissed entries that still last."""
        return self.exclude(state=HealthEntry.EntryState.CLEARED)

    def in_state(self, state: str) -> Self:
        """Select entries in this state, so that a list of the newest is read in the order of an index.

        The indexes of active entries serve every state but `cleared`. Nearly all entries are cleared: an index by state
        would lead to all of them, to be sorted.
        """
        states = HealthEntry.EntryState
        if state == states.CLEARED:
            return self.exclude(state__in=[other for other in states if other != states.CLEARED])
        return self.active().filter(state=state)

    def matching(self, *, node: str = "", rule: str = "", severity: str = "") -> Self:
        """Select by those values that are given.

        A node or a rule has few entries, a severity has a good part of all: without statistics SQLite may read those.
        """
        rows = self.filter(**{name: value for name, value in (("node", node), ("rule", rule)) if value})
        if severity and (node or rule):
            return rows.exclude(severity__in=[other for other in SEVERITIES if other != severity])
        return rows.filter(severity=severity) if severity else rows

    def open(self) -> Self:
        return self.in_state(HealthEntry.EntryState.OPEN)

    def of_real_nodes(self) -> Self:
        """Leave out the machines of `vigil up --demo`, of which nobody is notified."""
        return self.exclude(node__in=Agent.objects.filter(is_made_up=True).values("node"))

    def waiting(self) -> Self:
        """Select the open entries that wait for a sysadmin's decision."""
        return self.open().filter(decision=HealthEntry.EntryDecision.PROPOSED)

    def undrained(self) -> Self:
        """Select the open entries whose node somebody undrained; they count again when they happen again."""
        undecided = self.open().filter(decision=HealthEntry.EntryDecision.NONE, decided_at__isnull=False)
        return undecided.filter(action__in=OUT_OF_SERVICE)

    def excluding(self) -> Self:
        """Select the open entries whose nodes new attempts avoid: not those that still wait for a decision."""
        return self.open().filter(action="exclude").exclude(decision=HealthEntry.EntryDecision.PROPOSED)

    def out_of_service_between(self, start: datetime, end: datetime) -> Self:
        """Select what was found in this time and takes its node out of service; what a game day planted is no failure.

        `start` and `end` count, too.
        """
        return self.filter(opened_at__range=(start, end), action__in=OUT_OF_SERVICE, is_planted=False)

    def due(self, now: datetime) -> Self:
        """Select active entries that change by themselves by now."""
        return self.active().filter(due_at__lte=now)


class HealthEntry(models.Model):
    """Stores what one rule found about one GPU, or about a node, from its first evidence until it was cleared.

    `watching` until the rule's count or time is reached, then `open`. A `dismissed` entry is open, too, but somebody
    decided that nothing is to be done about it. Evidence that comes after `cleared` begins another entry.
    """

    class EntryState(models.TextChoices):
        WATCHING = "watching"
        OPEN = "open"
        DISMISSED = "dismissed"
        CLEARED = "cleared"

    class EntryDecision(models.TextChoices):
        """What was decided about the rule's action."""

        NONE = "", "nothing to decide"
        PROPOSED = "proposed", "waits for a sysadmin"
        AUTOMATIC = "automatic", "done by Vigil"
        APPROVED = "approved"
        DISMISSED = "dismissed"

    node = models.CharField(max_length=255)
    gpu = models.ForeignKey(Gpu, models.SET_NULL, null=True, blank=True, related_name="health_entries", db_index=False)
    item = models.CharField(max_length=300, blank=True, help_text="The mount or port that it is about.")
    rule = models.CharField(max_length=64)
    title = models.CharField(max_length=120, help_text="The rule's title when the entry began.")
    detail = models.CharField(
        max_length=200, blank=True, default="",
        help_text="What equal findings on many nodes have in common: the versions below a minimum.",
    )  # fmt: skip
    state = models.CharField(max_length=16, choices=EntryState.choices, default=EntryState.WATCHING)
    severity = models.CharField(max_length=16)
    action = models.CharField(max_length=16)
    count = models.BigIntegerField(default=0)
    first_seen = models.DateTimeField(help_text="Time of the first evidence.")
    last_seen = models.DateTimeField(help_text="Time of the newest evidence.")
    opened_at = models.DateTimeField(null=True, blank=True)
    cleared_at = models.DateTimeField(null=True, blank=True)
    due_at = models.DateTimeField(null=True, blank=True, help_text="When it next changes by itself.")
    is_planted = models.BooleanField(default=False, help_text="All its evidence was planted by a game day.")
    is_late = models.BooleanField(default=False, help_text="Its evidence was old when it arrived: proposed only.")
    evidence = models.JSONField(default=list, blank=True, help_text="Newest observations: time, signal, fields.")
    progress = models.JSONField(default=dict, blank=True, editable=False, help_text="The engine's state.")
    decision = models.CharField(max_length=16, choices=EntryDecision.choices, default=EntryDecision.NONE, blank=True)
    decided_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, blank=True, related_name="+")
    decided_at = models.DateTimeField(null=True, blank=True)
    decision_reason = models.TextField(blank=True)
    held_back = models.TextField(blank=True, help_text="Why Vigil did not act by itself.")
    order = models.ForeignKey(
        NodeOrder, models.SET_NULL, null=True, blank=True, related_name="health_entries", db_index=False
    )

    objects = HealthEntryQuerySet.as_manager()

    class Meta:
        ordering = ("-id",)
        verbose_name = "health entry"
        verbose_name_plural = "health entries"
        constraints = (
            models.UniqueConstraint(
                fields=["node", "rule", "gpu", "item"], condition=~Q(state="cleared") & Q(gpu__isnull=False),
                name="one_active_entry_a_gpu_and_rule",
            ),
            models.UniqueConstraint(
                fields=["node", "rule", "item"], condition=~Q(state="cleared") & Q(gpu__isnull=True),
                name="one_active_entry_a_node_and_rule",
            ),
        )  # fmt: skip
        indexes = (
            models.Index(fields=["node", "-id"], name="health_of_one_node"),
            models.Index(fields=["rule", "-id"], name="health_of_a_rule"),
            models.Index(fields=["severity", "-id"], name="health_of_a_severity"),
            models.Index(fields=["-id"], condition=~Q(state="cleared"), name="health_active_newest"),
            models.Index(fields=["rule", "-id"], condition=~Q(state="cleared"), name="health_active_of_a_rule"),
            models.Index(fields=["severity", "-id"], condition=~Q(state="cleared"), name="health_active_of_severity"),
            models.Index(fields=["node", "rule"], condition=~Q(state="cleared"), name="health_active_of_a_node"),
            models.Index(fields=["node", "rule"], condition=Q(state="cleared"), name="health_cleared_of_a_node"),
            models.Index(fields=["opened_at"], name="health_opened"),
            models.Index(fields=["order"], condition=Q(order__isnull=False), name="health_of_an_order"),
            models.Index(fields=["due_at"], condition=~Q(state="cleared"), name="health_due"),
            models.Index(
                fields=["state", "decision", "severity", "action", "rule", "detail", "-last_seen"],
                condition=~Q(state="cleared"),
                name="health_active_alike",
            ),
            models.Index(fields=["-cleared_at"], condition=Q(state="cleared"), name="health_cleared_newest"),
        )

    def __str__(self) -> str:
        return f"{self.rule} on {self.node or self.item or 'the cluster'}"

    @property
    def is_active(self) -> bool:
        return self.state != self.EntryState.CLEARED

    @property
    def is_undrained(self) -> bool:
        """Return whether somebody undrained its node while it was open, as `undrained` selects entries."""
        is_undecided = self.state == self.EntryState.OPEN and self.decision == self.EntryDecision.NONE
        return is_undecided and self.decided_at is not None and self.action in OUT_OF_SERVICE

    def observations(self, *, hidden: Collection[str] = PEOPLE | KERNEL_TEXT) -> list[EntryObservation]:
        """Return the evidence, the newest last; without what cannot be read, and without the hidden fields."""
        rows = self.evidence if isinstance(self.evidence, list) else []
        found = [EntryObservation(*row) for row in rows if _is_observation(row)]
        return [
            row._replace(fields={name: value for name, value in row.fields.items() if name not in hidden})
            for row in found
        ]


def _is_observation(row: object) -> bool:
    """Return whether this is what `EntryObservation` stores, at a moment that a date can express."""
    if not isinstance(row, list) or len(row) != 4:
        return False
    at, signal, fields, count = row
    return (
        untrusted.moment(at) is not None and isinstance(signal, str) and isinstance(fields, dict)
        and isinstance(count, int) and all(isinstance(value, bool | int | float | str) for value in fields.values())
    )  # fmt: skip


class SiteRule(models.Model):
    """A health rule of this site. One with the name of a shipped rule replaces that one."""

    name = models.CharField(max_length=64, unique=True)
    toml = models.TextField(help_text="One [[rule]] table, as docs/reference/health-rules.md describes it.")
    is_enabled = models.BooleanField(default=True, help_text="Off: the shipped rule does not apply either.")
    version = models.IntegerField(default=1, help_text="Grows with each change, so that nobody overwrites another's.")
    changed_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    changed_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ("name",)
        verbose_name = "health rule"

    def __str__(self) -> str:
        return self.name


class ActionPolicy(models.Model):
    """Stores how far Vigil goes with one action of health rules. Without a row VIGIL_HEALTH decides."""

    class PolicyMode(models.TextChoices):
        ACT = "act"
        PROPOSE = "propose"
        IGNORE = "ignore"

    action = models.CharField(max_length=16, unique=True)
    mode = models.CharField(max_length=16, choices=PolicyMode.choices)
    changed_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, related_name="+")
    changed_at = models.DateTimeField(auto_now=True)

    class Meta:
        ordering = ("action",)
        verbose_name = "action policy"
        verbose_name_plural = "action policies"

    def __str__(self) -> str:
        return f"{self.action}: {self.mode}"


class HealthControl(models.Model):
    """The single row whose lock serialises automatic actions, with the state of the breaker."""

    ID = 1
    tripped_at = models.DateTimeField(null=True, blank=True, help_text="Since when nothing is done automatically.")
    tripped_by = models.CharField(max_length=64, blank=True, help_text="The rule that fired almost everywhere.")
    tripped_detail = models.TextField(blank=True)
    reset_at = models.DateTimeField(null=True, blank=True)
    reset_by = models.ForeignKey(settings.AUTH_USER_MODEL, models.SET_NULL, null=True, blank=True, related_name="+")

    def __str__(self) -> str:
        return "tripped" if self.tripped_at else "closed"

    @staticmethod
    def locked() -> HealthControl:
        """Return the row, locked until the transaction ends; created on first use."""
        rows = HealthControl.objects
        rows.bulk_create([HealthControl(pk=HealthControl.ID)], ignore_conflicts=True)
        return rows.select_for_update().get(pk=HealthControl.ID)
