"""Store a sweep: jobs that differ in a few values, submitted together."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

from django.conf import settings
from django.db import models
from django.db.models import Count, Q

from portal.models import Project, User
from vigil_core import formatting

NAMED_REFUSALS = 3
"""Combinations without a job that a sentence names."""
_NUMBERS = re.compile(r"\d[\d,]*(?:, \d[\d,]*)*")


def _new_key() -> str:
    return secrets.token_hex(8)


def values_text(values: Mapping[str, Any]) -> str:
    """Return "run.seed = 3, run.clients = 20"."""
    return ", ".join(f"{path} = {json.dumps(value, ensure_ascii=False)}" for path, value in values.items())


def refusals_text(refused: Sequence[tuple[Mapping[str, Any], str]], combinations: int) -> str:
    """Return how many combinations have no job, and why, each reason once; "" if all have one.

    Reasons that differ in numbers alone are one: hundreds of seeds fail alike.
    """
    if not refused:
        return ""
    of = formatting.plural(combinations, "combination")
    lead = f"{formatting.count(len(refused))} of {of} {'has' if len(refused) == 1 else 'have'} no job."
    reasons: dict[str, str] = {}
    for values, message in refused:
        reasons.setdefault(_NUMBERS.sub("#", message), f"With {values_text(values)}: {message}")
    shown = list(reasons.values())[:NAMED_REFUSALS]
    rest = [f"The sweep's page lists all {len(refused):,}."] if len(refused) > len(shown) else []
    return " ".join([lead, *shown, *rest])


_IS_OPEN = Q(latest__ended_at=None) | Q(latest__decided_at=None)


class SweepQuerySet(models.QuerySet["Sweep"]):
    def visible_to(self, user: User) -> Self:
        return self if user.is_sysadmin else self.filter(project__in=user.memberships.values("project"))


class Sweep(models.Model):
    """The jobs of a sweep as a group. Its state is theirs, never a second copy."""

    project = models.ForeignKey(Project, models.PROTECT, related_name="sweeps")
    owner = models.ForeignKey(settings.AUTH_USER_MODEL, models.PROTECT, related_name="sweeps")
    name = models.CharField(max_length=128)
    spec_toml = models.TextField(help_text="The specification as written, including [sweep].")
    axes = models.JSONField(
        default=list, help_text="Pairs of path and values in the order written (PostgreSQL sorts keys of objects)."
    )
    refused = models.JSONField(
        default=list, blank=True, help_text="Combinations without a job: pairs of values by path and reason."
    )
    at_once = models.PositiveIntegerField(
        null=True, blank=True, help_text="Maximum number of its jobs that run at the same time; null: no limit."
    )
    key = models.CharField(
        max_length=16,
        unique=True,
        default=_new_key,
        help_text="Part of the name and comment of its array, and of its upload's name.",
    )
    prepared = models.PositiveIntegerField(
        default=0, help_text="Run directories of jobs below this index are written; the array needs all of them."
    )
    stopped_why = models.TextField(
        blank=True, help_text="Why Vigil stopped the sweep, in a sentence; empty: it did not."
    )
    created_at = models.DateTimeField(auto_now_add=True)

    objects = SweepQuerySet.as_manager()

    class Meta:
        ordering = ("-id",)

    def __str__(self) -> str:
        return f"sweep {self.pk} {self.name}"

    def counts(self) -> dict[str, int]:
        """Return how many of its jobs are in each state."""
        rows = self.jobs.order_by().values_list("latest__state").annotate(count=Count("pk"))
        return {state: count for state, count in rows if state}

    @property
    def over(self) -> dict[str, list[Any]]:
        """Return the swept values by path; the last path varies fastest."""
        return dict(self.axes)

    def is_over(self) -> bool:
        """Return whether all of its jobs have ended and none will be restarted."""
        return not self.jobs.filter(_IS_OPEN).exists()


def states_of(sweeps: Iterable[Sweep]) -> dict[int, tuple[dict[str, int], bool]]:
    """Return, by sweep id, the results of `counts` and `is_over` for all, in one query."""
    found: dict[int, tuple[dict[str, int], bool]] = {sweep.pk: ({}, True) for sweep in sweeps}
    jobs = Sweep.jobs.rel.related_model._default_manager.filter(sweep__in=list(found)).order_by()
    rows = jobs.values_list("sweep", "latest__state")
    for number, state, count, going in rows.annotate(count=Count("pk"), going=Count("pk", filter=_IS_OPEN)):
        counts, is_over = found[number]
        found[number] = (counts | ({state: count} if state else {}), is_over and not going)
    return found
