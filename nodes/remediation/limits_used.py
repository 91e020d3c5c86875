"""Read how much of the limits on automatic drains is used."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db.models import BooleanField, Exists, ExpressionWrapper, OuterRef, Q

from nodes.cluster.service_state import service_state
from nodes.health import limits
from nodes.models import HealthEntry, NodeOrder

MAX_PLANTED = 4
"""Nodes that game days take out in an hour: each plants at most two faults that drain a node."""
_HOUR = timedelta(seconds=limits.HOUR_S)


@dataclass(frozen=True)
class PartitionUse:
    """A partition's nodes out of service, and how many may be."""

    name: str
    out: int
    most: int
    nodes: int


@dataclass(frozen=True)
class LimitsUsed:
    """Automatic drains of the last hour, and partitions close to their limit, the closest first."""

    drained: int
    most: int
    partitions: list[PartitionUse]


def limits_used(now: datetime) -> LimitsUsed:
    cluster = service_state()
    partitions = [
        PartitionUse(name, len(cluster.out & members), limits.partition_limit(len(members)), len(members))
        for name, members in sorted(cluster.partitions.items())
    ]
    partitions.sort(key=lambda partition: partition.out - partition.most, reverse=True)
    drained = {drain.node for drain in automatic_drains(now)}
    return LimitsUsed(len(drained), limits.hourly_limit(cluster.nodes), partitions)


def automatic_drains(now: datetime) -> list[limits.AutomaticDrain]:
    """Return all drains that rules ordered in the last hour, whatever became of them; not those of game days.

    Agents say what was planted: if that is more than game days plant, all of it counts. So does a drain for a planted
    finding once real evidence followed.
    """
    real = HealthEntry.objects.filter(order=OuterRef("pk"), is_planted=False)
    rows = NodeOrder.objects.by_health_rules().filter(action=NodeOrder.Action.DRAIN, asked_at__gt=now - _HOUR)
    is_injected = ExpressionWrapper(Q(is_planted=True) & ~Exists(real), BooleanField())
    # In no order: in that of ids, all orders would be read.
    found = list(rows.order_by().annotate(is_injected=is_injected).values_list("node", "asked_at", "is_injected"))
    is_credible = len({node for node, _, is_planted in found if is_planted}) <= MAX_PLANTED
    return [
        limits.AutomaticDrain(node, at.timestamp())
        for node, at, is_planted in found
        if not (is_planted and is_credible)
    ]
