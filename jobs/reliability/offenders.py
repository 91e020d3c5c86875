"""Nodes on which more fails than their node-days explain, and whether by the node or by one program. No Django.

Each node's failures are held against what the others' rate lets expect in its own node-days: the chance of so many or
more, by Poisson's law, times the number of nodes looked at (Bonferroni): among a thousand sound nodes some always look
bad. With each program counted once the same must hold before the node is blamed: a program that fails over and over
fails wherever it runs. Meta finds its "lemon nodes" by how many different jobs fail on them, too (arXiv 2410.21680).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from jobs.reliability import poisson
from jobs.reliability.rate import FEW

SURE = 0.05
MOST_SCORE = 300.0


@dataclass(frozen=True)
class NodeFailures:
    """What was counted on one node; `programs`: how many different ones its failures are of."""

    node: str
    failures: int
    programs: int
    node_days: float


@dataclass(frozen=True)
class Offender:
    counts: NodeFailures
    expected: float
    chance: float
    """Of so many failures by chance alone, on any of the nodes."""
    is_node: bool
    """Different programs failed; else it is one program, or few that failed often."""

    @property
    def score(self) -> float:
        """How many zeros the chance has: from 1.3 on it is no chance any more."""
        return MOST_SCORE if self.chance <= 0 else min(MOST_SCORE, -math.log10(self.chance))

    @property
    def times(self) -> float:
        """How many times what was to be expected."""
        return self.counts.failures / self.expected


def offenders(nodes: Iterable[NodeFailures]) -> list[Offender]:
    """The worst first."""
    counted = list(nodes)
    failures, days = sum(node.failures for node in counted), sum(node.node_days for node in counted)
    found = [_judge(node, failures, days, len(counted)) for node in counted if node.failures >= FEW]
    return sorted(
        (offender for offender in found if offender is not None),
        key=lambda offender: (-offender.score, offender.counts.node),
    )


def _judge(node: NodeFailures, failures: int, days: float, nodes: int) -> Offender | None:
    others_days, others_failures = days - node.node_days, failures - node.failures
    if others_days <= 0 or node.node_days <= 0:
        return None
    # One more than was seen: of others that have not failed at all nobody knows that they never will.
    expected = (others_failures + 1) / others_days * node.node_days
    if node.failures <= expected:
        return None
    chance = min(1.0, nodes * poisson.at_least(node.failures, expected))
    if chance >= SURE:
        return None
    is_node = nodes * poisson.at_least(node.programs, expected) < SURE
    return Offender(node, expected, chance, is_node)
