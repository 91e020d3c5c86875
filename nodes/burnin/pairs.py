"""Find which of two nodes is to blame for an all-reduce that failed or was slow: both report the same one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from statistics import median

from nodes.burnin.evidence import BurnInFinding, GoldenKey, GoldenValue, NodeResults, figure
from nodes.burnin.reports import ItemSummary
from nodes.burnin.speeds import PeerMedians, is_slow, record_warning

MIN_PAIRS = 3  # to compare the speed of pairs
Pair = tuple[str, str]


@dataclass(frozen=True)
class NormalSpeed:
    """Holds the speed that a pair is compared with, and names where it comes from."""

    value: float
    source: str

    def text(self, unit: str) -> str:
        return f"{self.source}: {figure(self.value)} {unit}"


@dataclass
class NodePairs:
    """The partners that a node met, and what is wrong with some of these pairs."""

    met: set[str] = field(default_factory=set)
    bad: dict[str, BurnInFinding] = field(default_factory=dict)

    @property
    def is_mostly_bad(self) -> bool:
        return len(self.bad) * 2 > len(self.met) > 1


def bad_pairs(
    nodes: Sequence[NodeResults], golden: Mapping[GoldenKey, GoldenValue], faulty: Set[str]
) -> Iterable[tuple[str, BurnInFinding]]:
    """Yield what is wrong with pairs, for the node to blame: the `faulty` one, else the one with mostly bad pairs.

    With none of these, or two, both are to blame. `faulty` are nodes with which something else is wrong: their partners
    waited for them in vain. A lost node is to blame before others, whose tests its loss may have ended.
    """
    pairs = _failed_pairs(nodes)
    yield from _add_slow(pairs, nodes, golden)
    for to_blame in ({results.node for results in nodes if results.is_node_lost}, faulty):
        yield from _explained(pairs, to_blame)
    for node, found in pairs.items():
        for partner, finding in found.bad.items():
            if found.is_mostly_bad or not pairs[partner].is_mostly_bad:
                yield node, finding


def slow_pairs(nodes: Sequence[NodeResults]) -> Iterable[tuple[Pair, str]]:
    """Yield the pairs that are much slower on GPUs than other pairs of nodes alike, with both speeds."""
    for key, (unit, speeds) in _speeds(nodes).items():
        medians = PeerMedians(value for values in speeds.values() for value in values)
        for pair, values in speeds.items() if key.is_gpu else ():
            value, normal = median(values), _normal(pair, speeds, medians)
            if normal is not None and is_slow(key, value, normal.value):
                yield pair, f"{figure(value)} {unit}; {normal.text(unit)}"


def _failed_pairs(nodes: Sequence[NodeResults]) -> dict[str, NodePairs]:
    pairs = {results.node: NodePairs() for results in nodes}
    for node, test in pair_tests(nodes):
        if test.absences == test.count:
            continue
        for one, other in ((node, test.item), (test.item, node)):
            pairs[one].met.add(other)
            if test.failures:
                pairs[one].bad[other] = BurnInFinding(f"All-reduce with {other}: {test.failure_text}.")
    return pairs


def _explained(pairs: Mapping[str, NodePairs], faulty: Set[str]) -> Iterable[tuple[str, BurnInFinding]]:
    """Remove the pairs of which one node is faulty, so that they count for nobody else, and yield them for that one."""
    for node in faulty:
        for partner, finding in list(pairs[node].bad.items()):
            if partner not in faulty:
                yield node, finding
                for one, other in ((node, partner), (partner, node)):
                    del pairs[one].bad[other]
                    pairs[one].met.discard(other)


def _add_slow(
    pairs: Mapping[str, NodePairs], nodes: Sequence[NodeResults], golden: Mapping[GoldenKey, GoldenValue]
) -> Iterable[tuple[str, BurnInFinding]]:
    """Add pairs that are slower than others. Yield warnings for those that only a golden record shows to be slow."""
    for key, (unit, speeds) in _speeds(nodes).items():
        medians, record = PeerMedians(value for values in speeds.values() for value in values), golden.get(key)
        for pair, values in speeds.items():
            value, normal = median(values), _normal(pair, speeds, medians)
            if normal is None and record is not None and record.value is not None and record.is_strong:
                normal = NormalSpeed(record.value, f"median of {record.source}")
            if normal is not None and is_slow(key, value, normal.value):
                for node, partner in (pair, pair[::-1]):
                    text = f"All-reduce with {partner}: {figure(value)} {unit}; {normal.text(unit)}."
                    pairs[node].bad.setdefault(partner, BurnInFinding(text, is_warning=not key.is_gpu))
            elif key.is_gpu and record is not None and record.value and is_slow(key, value, record.value):
                for node in pair:
                    yield node, record_warning(key, unit, record)


def _normal(pair: Pair, speeds: Mapping[Pair, Sequence[float]], medians: PeerMedians) -> NormalSpeed | None:
    """Return what a pair is compared with. Of three nodes, a slow one is in two of the three pairs."""
    if len(speeds) < MIN_PAIRS:
        return None
    if len(speeds) == MIN_PAIRS:
        others = [median(values) for other, values in speeds.items() if other != pair]
        return NormalSpeed(max(others), "fastest other pair")
    value = medians.without(*speeds[pair])
    return None if value is None else NormalSpeed(value, "median of other pairs")


def _speeds(nodes: Sequence[NodeResults]) -> dict[GoldenKey, tuple[str, dict[Pair, list[float]]]]:
    """Return by key the unit, and by pair what either node measured; only of nodes that are alike."""
    by_name = {results.node: results for results in nodes}
    models = {results.node: results.machine.model for results in nodes if results.machine is not None}
    found: dict[GoldenKey, tuple[str, dict[Pair, list[float]]]] = {}
    for node, test in pair_tests(nodes):
        if test.values and models.get(node) == models.get(test.item, models.get(node)):
            pair = (min(node, test.item), max(node, test.item))
            _, speeds = found.setdefault(by_name[node].key(test), (test.unit, {}))
            speeds.setdefault(pair, []).append(median(test.values))
    return found


def pair_tests(nodes: Sequence[NodeResults]) -> Iterable[tuple[str, ItemSummary]]:
    """Yield the tests of pairs of these nodes, each with the node that reports it; either one may."""
    names = {results.node for results in nodes}
    for results in nodes:
        for test in results.tests:
            if test.test == "pair" and test.item in names and test.item != results.node:
                yield results.node, test
