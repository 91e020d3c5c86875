"""Find nodes that fail more than their node-days explain, and whether the node or one program is to blame. No Django.

Each node's failures are compared with the rate of the other nodes over its own node-days: the probability of that many
or more, by Poisson's law, times the number of nodes tested (Bonferroni), since among a thousand sound nodes some always
look bad. The same must hold with each program counted once before the node is blamed: a program that fails repeatedly
fails wherever it runs. Meta also finds its "lemon nodes" by the number of different jobs that fail on them
(arXiv 2410.21680).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from jobs.reliability import poisson
from jobs.reliability.rate import MIN_FAILURES

SIGNIFICANCE = 0.05
MAX_SCORE = 300.0


@dataclass(frozen=True)
class NodeFailures:
    """The failures counted on one node; `programs` is the number of different programs that failed."""

    node: str
    failures: int
    programs: int
    node_days: float


@dataclass(frozen=True)
class Offender:
    counts: NodeFailures
    expected: float
    chance: float
    """Probability of this many failures on any of the nodes by chance alone."""
    programs_chance: float
    """The same, with each program counted once."""
    is_node: bool
    """Whether different programs failed, rather than one or a few that failed often."""

    @property
    def score(self) -> float:
        """Return minus the decimal logarithm of the chance: from 1.3 on, chance is excluded."""
        return MAX_SCORE if self.chance <= 0 else min(MAX_SCORE, -math.log10(self.chance))

    @property
    def times(self) -> float:
        """Return the ratio of observed to expected failures."""
        return self.counts.failures / self.expected


@dataclass(frozen=True)
class ProgramFailures:
    """Failures of one program with the same error, by where they happened.

    `share_of_one_node`: the share of the failures that ran on the node with most of them. If it is high, the node may
    be to blame as well as the program.
    """

    failures: int
    nodes: int
    share_of_one_node: float

    @classmethod
    def count(cls, places: Sequence[Collection[str]]) -> ProgramFailures:
        """Count from the nodes of each failed attempt."""
        per_node = Counter(node for nodes in places for node in set(nodes))
        most = max(per_node.values(), default=0)
        return cls(len(places), len(per_node), round(most / len(places), 3) if places else 0.0)


def offenders(nodes: Iterable[NodeFailures]) -> list[Offender]:
    """Return the offenders, worst first."""
    counted = list(nodes)
    failures, days = sum(node.failures for node in counted), sum(node.node_days for node in counted)
    found = [_judge(node, failures, days, len(counted)) for node in counted if node.failures >= MIN_FAILURES]
    return sorted(
        (offender for offender in found if offender is not None),
        key=lambda offender: (-offender.score, offender.counts.node),
    )


def _judge(node: NodeFailures, failures: int, days: float, nodes: int) -> Offender | None:
    others_days, others_failures = days - node.node_days, failures - node.failures
    if others_days <= 0 or node.node_days <= 0:
        return None
    # One more than observed: even if no other node has failed yet, its rate is not zero.
    expected = (others_failures + 1) / others_days * node.node_days
    if node.failures <= expected:
        return None
    chance = min(1.0, nodes * poisson.at_least(node.failures, expected))
    if chance >= SIGNIFICANCE:
        return None
    programs_chance = min(1.0, nodes * poisson.at_least(node.programs, expected))
    return Offender(node, expected, chance, programs_chance, is_node=programs_chance < SIGNIFICANCE)
