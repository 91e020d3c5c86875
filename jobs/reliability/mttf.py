"""How often what Vigil runs here is interrupted, told from the incidents and node-hours of the last weeks.

Nobody has seen enough of a few nodes, so they are taken for as good as the rest until they show otherwise: one failure
in the time that the rest takes for one counts as if they had had it; and of the rest, before anything is known, one in
PRIOR_HOURS.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, date, timedelta

from django.db.models import Count, Q, Sum
from django.utils import timezone

from jobs.models import Failure, NodeHeld, ProjectHeld
from jobs.reliability.held import Holding, uncounted
from jobs.reliability.held import since as held_since

DAYS = 30
PRIOR_HOURS = 24.0
"""One failure in so many node-hours is what is assumed where nothing has been seen; it counts as if it had been."""


@dataclass(frozen=True)
class Interruptions:
    """What was seen: node-hours, and failures by whether it is known on which node."""

    node_hours: float
    named: int
    unnamed: int

    @property
    def total(self) -> int:
        return self.named + self.unnamed

    @property
    def per_hour(self) -> float:
        """Of one node."""
        return (self.total + 1) / (self.node_hours + PRIOR_HOURS)


def hours_between_failures(nodes: int, *, partition: str = "", names: Collection[str] = ()) -> float | None:
    """Mean time between failures of a job on so many nodes, hours; None while less is known than is assumed.

    `names`: the nodes, where they are known already; else those of its partition count, as far as there were any.
    """
    since = timezone.now().astimezone(UTC).date() - timedelta(days=DAYS - 1)
    live = uncounted(timezone.now())
    everywhere = interruptions(since, live)
    if everywhere.node_hours < PRIOR_HOURS:
        return None
    rate = _of_nodes(everywhere, names, since, live) if names else _of_partition(everywhere, partition, since, live)
    return 1 / rate / max(1, nodes)


def interruptions(since: date, live: list[Holding], partition: str = "") -> Interruptions:
    """Those of all nodes together, or of one partition."""
    only = Q(partition=partition) if partition else Q()
    hours = (ProjectHeld.objects.filter(only, held_since(since)).aggregate(s=Sum("node_s"))["s"] or 0.0) / 3600
    hours += sum(_hours(one, since) * max(1, len(one.nodes)) for one in live if partition in ("", one.partition))
    failures = Failure.objects.filter(only, day__gte=since, is_interruption=True)
    counts = failures.aggregate(named=Count("pk", filter=~Q(node="")), unnamed=Count("pk", filter=Q(node="")))
    return Interruptions(hours, counts["named"], counts["unnamed"])


def _of_partition(everywhere: Interruptions, partition: str, since: date, live: list[Holding]) -> float:
    if not partition:
        return everywhere.per_hour
    own = interruptions(since, live, partition)
    return (own.total + 1) / (own.node_hours + 1 / everywhere.per_hour)


def _of_nodes(everywhere: Interruptions, names: Collection[str], since: date, live: list[Holding]) -> float:
    """Of one of these nodes: their own failures, and their part of those of which nobody knows the node."""
    held = NodeHeld.objects.filter(held_since(since), node__in=names).aggregate(s=Sum("node_s"))["s"] or 0.0
    hours = held / 3600 + sum(_hours(one, since) * len(set(one.nodes) & set(names)) for one in live)
    own = Failure.objects.filter(day__gte=since, node__in=names, is_interruption=True).count()
    known = everywhere.node_hours + PRIOR_HOURS
    return (own + 1) / (hours + known / (everywhere.named + 1)) + everywhere.unnamed / known


def _hours(one: Holding, since: date) -> float:
    return sum(seconds for day, seconds in one.days() if day >= since) / 3600
