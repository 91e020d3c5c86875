"""Limit how much Vigil takes out of service by itself, and stop it when something else is wrong. No Django.

Limits: at most 5 % of all nodes in an hour, but at least one; and a node only if at most 20 % of each of its partitions
are then out of service, for any reason: no node at all of a partition with fewer than five. Beyond that findings are
only proposed. The breaker: if one rule fires on three nodes and a tenth of the cluster within two minutes, something
else is wrong (a switch, a driver, the rule itself). Then nothing is done automatically until a person resets it.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

HOUR_S = 3_600.0
HOURLY_SHARE = 0.05
PARTITION_SHARE = 0.20
MIN_NODES = math.ceil(1 / PARTITION_SHARE)
"""Nodes of a partition from which on one of them may be drained automatically."""
BREAKER_NODES = 3
BREAKER_SHARE = 0.10
BREAKER_S = 120.0


@dataclass(frozen=True)
class ServiceState:
    """The nodes by partition, and those out of service or about to be."""

    partitions: Mapping[str, frozenset[str]]
    out: frozenset[str]
    nodes: int


@dataclass(frozen=True)
class AutomaticDrain:
    """A node that Vigil drained by itself."""

    node: str
    at: float


@dataclass(frozen=True)
class Opening:
    """A rule that opened a finding on a node."""

    rule: str
    node: str
    at: float


def hourly_limit(nodes: int) -> int:
    """Return how many nodes may be drained automatically in an hour."""
    return max(1, math.floor(nodes * HOURLY_SHARE))


def partition_limit(nodes: int) -> int:
    """Return how many nodes of a partition may be out of service after an automatic drain."""
    return math.floor(nodes * PARTITION_SHARE)


def refusal(cluster: ServiceState, drains: Iterable[AutomaticDrain], node: str, now: float) -> str:
    """Return why this node may not be drained automatically now; "" if it may.

    `drains` are all automatic drains of the last hour, whatever became of them.
    """
    recent = {drain.node for drain in drains if drain.at > now - HOUR_S}
    limit = hourly_limit(cluster.nodes)
    if node not in recent and len(recent) >= limit:
        return f"Vigil has drained {len(recent)} of at most {limit} nodes in the last hour."
    return partition_refusal(cluster, node)


def partition_refusal(cluster: ServiceState, node: str) -> str:
    """Return which partition would have too few nodes in service without this one; "" if none."""
    for name, members in sorted(cluster.partitions.items()):
        if node not in members:
            continue
        out, limit = cluster.out & members, partition_limit(len(members))
        if not limit:
            return (
                f"{name} has {len(members)} node{'s' * (len(members) != 1)}. Vigil drains by itself only where a"
                f" partition has {MIN_NODES} or more: 20 % of fewer is less than one. Approve the drain to take it"
                " out."
            )
        if len(out | {node}) > limit:
            more = "that is more than 20 %" if node in out else "with it more than 20 % would be"
            return f"{len(out)} of {len(members)} nodes of {name} are out of service: {more}."
    return ""


def tripping_rule(openings: Iterable[Opening], nodes: int) -> tuple[str, int] | None:
    """Return the rule that trips the breaker and on how many nodes it fired within `BREAKER_S`, whenever that was.

    The times are those of the evidence: what agents could only report later happened at once all the same.
    """
    by_rule: defaultdict[str, list[Opening]] = defaultdict(list)
    for opening in openings:
        by_rule[opening.rule].append(opening)
    for rule, found in sorted(by_rule.items()):
        most = _most_at_once(found)
        if most >= max(BREAKER_NODES, nodes * BREAKER_SHARE):
            return rule, most
    return None


def _most_at_once(openings: Iterable[Opening]) -> int:
    """Return the greatest number of different nodes among the openings of any `BREAKER_S`."""
    window, nodes, most = deque[Opening](), Counter[str](), 0
    for opening in sorted(openings, key=lambda opening: opening.at):
        window.append(opening)
        nodes[opening.node] += 1
        while window[0].at < opening.at - BREAKER_S:
            oldest = window.popleft().node
            nodes[oldest] -= 1
            if not nodes[oldest]:
                del nodes[oldest]
        most = max(most, len(nodes))
    return most
