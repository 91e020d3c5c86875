"""Estimate how often jobs here are interrupted, from the incidents and node-hours of the last weeks.

Few nodes have seen enough to be judged alone, so they are assumed to be as good as the rest until they show otherwise:
one failure in the time in which the rest has one is added to their count; and to the rest, before anything is known,
one in PRIOR_HOURS.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, timedelta
from functools import lru_cache
from time import monotonic

from django.db.models import Count, Sum
from django.utils import timezone

from jobs.models import Failure, NodeHeld, ProjectHeld
from jobs.reliability.node_time import default_partition, rows_since, uncounted

DAYS = 30
PRIOR_HOURS = 24.0
"""Node-hours per failure assumed before any was observed; it counts like an observed failure."""
CACHE_S = 60.0
"""Seconds that a rate is cached: every attempt needs it when prepared, and a sweep has hundreds."""


@dataclass
class Interruptions:
    """Observed node-hours, and failures by whether their node is known."""

    node_hours: float = 0.0
    named: int = 0
    unnamed: int = 0

    @property
    def total(self) -> int:
        return self.named + self.unnamed

    @property
    def per_hour(self) -> float:
        """Return the failure rate per node-hour."""
        return (self.total + 1) / (self.node_hours + PRIOR_HOURS)


@dataclass(frozen=True)
class _Snapshot:
    """The last weeks: overall, by partition, and by node."""

    everywhere: Interruptions
    partitions: dict[str, Interruptions]
    nodes: dict[str, Interruptions]
    default_partition: str


def hours_between_failures(nodes: int, *, partition: str = "", names: Collection[str] = ()) -> float | None:
    """Return the mean time between failures (hours) of a job on this many nodes; None if too little has been observed.

    `names` are the nodes if known; otherwise the partition's nodes count, as far as it had any.
    """
    snapshot = _snapshot(int(monotonic() // CACHE_S))
    if snapshot.everywhere.node_hours < PRIOR_HOURS:
        return None
    rate = _of_nodes(snapshot, names) if names else _of_partition(snapshot, partition or snapshot.default_partition)
    return 1 / rate / max(1, nodes)


def _of_partition(snapshot: _Snapshot, partition: str) -> float:
    if not partition:
        return snapshot.everywhere.per_hour
    interruptions = snapshot.partitions.get(partition, Interruptions())
    return (interruptions.total + 1) / (interruptions.node_hours + 1 / snapshot.everywhere.per_hour)


def _of_nodes(snapshot: _Snapshot, names: Collection[str]) -> float:
    """Return the failure rate per hour of one of these nodes.

    It counts their own failures, and their share of the failures without a known node.
    """
    nodes = [snapshot.nodes[name] for name in set(names) if name in snapshot.nodes]
    hours, failures = sum(node.node_hours for node in nodes), sum(node.named for node in nodes)
    total_hours = snapshot.everywhere.node_hours + PRIOR_HOURS
    return (failures + 1) / (
        hours + total_hours / (snapshot.everywhere.named + 1)
    ) + snapshot.everywhere.unnamed / total_hours


@lru_cache(maxsize=1)
def _snapshot(when: int) -> _Snapshot:
    """Load the data for all callers; it has as many rows as there are partitions and nodes."""
    now = timezone.now()
    since = now.astimezone(UTC).date() - timedelta(days=DAYS - 1)
    everywhere = Interruptions()
    partitions: dict[str, Interruptions] = defaultdict(Interruptions)
    nodes: dict[str, Interruptions] = defaultdict(Interruptions)
    for name, seconds in ProjectHeld.objects.filter(rows_since(since)).values_list("partition").annotate(Sum("node_s")):
        partitions[name].node_hours += seconds / 3600
    for name, seconds in NodeHeld.objects.filter(rows_since(since)).values_list("node").annotate(Sum("node_s")):
        nodes[name].node_hours += seconds / 3600
    for allocation in uncounted(now):
        hours = allocation.seconds(since) / 3600
        partitions[allocation.partition].node_hours += hours * max(1, len(allocation.nodes))
        for name in allocation.nodes:
            nodes[name].node_hours += hours
    failures = Failure.objects.filter(day__gte=since, is_interruption=True).order_by()
    for partition, name, number in failures.values_list("partition", "node").annotate(Count("pk")):
        if name:
            partitions[partition].named += number
            nodes[name].named += number
        else:
            partitions[partition].unnamed += number
    for interruptions in partitions.values():
        everywhere.node_hours += interruptions.node_hours
        everywhere.named += interruptions.named
        everywhere.unnamed += interruptions.unnamed
    return _Snapshot(everywhere, dict(partitions), dict(nodes), default_partition())
