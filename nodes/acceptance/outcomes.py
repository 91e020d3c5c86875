"""Judge what the tests of an acceptance showed: the burn-in of every node, all pairs, and failures during the time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from nodes.acceptance.clauses import FAILED, NOT_TRIED, PASSED, ClauseOutcome
from nodes.burnin import judge
from nodes.burnin.speeds import SLOWEST_SHARE, PeerMedians
from vigil_core import formatting

TOGETHER = timedelta(minutes=10)
"""Findings on one node within this time are one failure: a GPU off the bus has an Xid, a lost GPU and more."""
LEAST_P = 0.05
LEAST_PAIRS = 3  # to compare the speed of pairs
GPUS_OF_A_NODE = 8  # in published rates


@dataclass(frozen=True)
class NodeVerdictRow:
    """The burn-in's verdict about one node, with its reasons."""

    node: str
    verdict: str
    findings: tuple[str, ...] = ()


@dataclass(frozen=True)
class PairResult:
    """The results of an all-reduce between two nodes. `speed`: the median, None if nothing was measured."""

    first: str
    second: str
    failures: int = 0
    detail: str = ""
    speed: float | None = None
    unit: str = ""
    is_on_gpus: bool = False


@dataclass(frozen=True)
class ExpectedFailures:
    """How many failures a published rate lets expect in the same time, and how probable so many or more are."""

    name: str
    source: str
    failures: float
    p: float
    is_required: bool = False


@dataclass(frozen=True)
class FailureCount:
    """The failures while the tests ran on `gpus` GPUs for `hours`. `texts`: each in a sentence."""

    hours: float
    gpus: int
    texts: tuple[str, ...]
    expected: tuple[ExpectedFailures, ...]


def burn_in_clause(nodes: Sequence[NodeVerdictRow], problem: str) -> ClauseOutcome:
    """Judge the verdicts. `problem`: why the burn-in ended early."""
    passed = sum(node.verdict == judge.PASSED for node in nodes)
    measured = f"{passed} of {formatting.plural(len(nodes), 'node')} passed."
    details = [
        f"{node.node}: {finding}"
        for node in sorted(nodes, key=lambda node: node.verdict != judge.FAILED)
        if node.verdict != judge.PASSED
        for finding in node.findings or (problem or "No verdict.",)
    ]
    if any(node.verdict == judge.FAILED for node in nodes):
        return ClauseOutcome("burn_in", FAILED, measured, tuple(details))
    if passed < len(nodes) or not nodes:
        return ClauseOutcome("burn_in", NOT_TRIED, problem or measured, tuple(details))
    return ClauseOutcome("burn_in", PASSED, measured)


def pairs_clause(nodes: int, pairs: Sequence[PairResult]) -> ClauseOutcome:
    """Judge the pairs that have results; all pairs of so many nodes must have some."""
    expected = nodes * (nodes - 1) // 2
    if not expected:
        return ClauseOutcome("pairs", NOT_TRIED, "There is only one node.")
    speeds = [(pair.speed, pair) for pair in pairs if pair.speed is not None and pair.is_on_gpus]
    medians = PeerMedians([speed for speed, _ in speeds])
    details = [f"{_pair(pair)}: {pair.detail or 'failed'}." for pair in pairs if pair.failures]
    for speed, pair in speeds if len(speeds) >= LEAST_PAIRS else ():
        normal = medians.without(speed)
        if normal is not None and speed < SLOWEST_SHARE["pair"] * normal:
            details.append(
                f"{_pair(pair)}: {formatting.measure(speed)} {pair.unit}, others {formatting.measure(normal)}."
            )
    measured = f"{len(pairs):,} of {formatting.plural(expected, 'pair')} tested{_speed_text(pairs)}."
    if details:
        return ClauseOutcome("pairs", FAILED, measured, tuple(details))
    return ClauseOutcome("pairs", PASSED if len(pairs) >= expected else NOT_TRIED, measured)


def merge_pairs(results: Iterable[PairResult]) -> list[PairResult]:
    """Return one result for each pair: either node reports it, and a failure that only one of them noticed counts."""
    found: dict[tuple[str, str], PairResult] = {}
    for pair in results:
        key = (min(pair.first, pair.second), max(pair.first, pair.second))
        other = found.get(key)
        if other is None or (pair.failures and not other.failures) or (other.speed is None and not other.failures):
            found[key] = pair
    return list(found.values())


def distinct_failures(events: Iterable[tuple[str, datetime, str]]) -> list[tuple[str, datetime, str]]:
    """Return the first of those events (node, time, text) that come together on one node."""
    found: list[tuple[str, datetime, str]] = []
    last: dict[str, datetime] = {}
    for node, at, text in sorted(events):
        if node not in last or at - last[node] > TOGETHER:
            found.append((node, at, text))
        last[node] = at
    return sorted(found, key=lambda event: (event[1], event[0]))


def node_days(gpus: int, hours: float) -> float:
    """Return the time in node-days of nodes with 8 GPUs, which published rates count."""
    return gpus / GPUS_OF_A_NODE * hours / 24


def failures_clause(count: FailureCount) -> ClauseOutcome:
    """Compare the count with the required published rate; the others are for information."""
    failures = formatting.plural(len(count.texts), "failure")
    required = next((expected for expected in count.expected if expected.is_required), None)
    if not count.hours or not count.gpus or required is None:
        why = "The tests did not run." if not count.hours else "Published rates are about nodes with GPUs."
        return ClauseOutcome("failures", NOT_TRIED, f"{failures}. {why}", count.texts)
    measured = (
        f"{failures} in {count.hours:.3g} h × {formatting.plural(count.gpus, 'GPU')}; "
        f"the published rate expects {formatting.measure(required.failures)}; p = {_p(required.p)}."
    )
    others = [
        f"{expected.name} ({expected.source}) expects {formatting.measure(expected.failures)}: p = {_p(expected.p)}."
        for expected in count.expected
        if not expected.is_required
    ]
    return ClauseOutcome("failures", FAILED if required.p < LEAST_P else PASSED, measured, (*count.texts, *others))


def _p(value: float) -> str:
    return f"{value:.2g}" if value >= 0.0001 else "below 0.0001"


def _pair(pair: PairResult) -> str:
    return f"{pair.first} and {pair.second}"


def _speed_text(pairs: Sequence[PairResult]) -> str:
    speeds = [pair for pair in pairs if pair.speed is not None]
    if not speeds:
        return ""
    slowest = min(speeds, key=lambda pair: pair.speed or 0.0)
    fastest = max(pair.speed or 0.0 for pair in speeds)
    low, high = formatting.measure(slowest.speed), formatting.measure(fastest)
    return f", {low}–{high} {slowest.unit} (slowest: {_pair(slowest)})" if low != high else f", {low} {slowest.unit}"
