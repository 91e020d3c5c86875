"""Judge what the tests of an acceptance showed: the burn-in of every node, all pairs, and failures during the time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import combinations
from statistics import median

from nodes.acceptance.clauses import BURN_IN, FAILED, NOT_APPLICABLE, NOT_CHECKED, PAIRS, PASSED, ClauseOutcome
from nodes.burnin import judge
from nodes.burnin.evidence import GAP, ON_GPU, TEST, BurnInFinding, NodeResults
from nodes.burnin.pairs import Pair, pair_tests, slow_pairs
from nodes.burnin.reports import ItemSummary
from vigil_core import formatting

TOGETHER = timedelta(minutes=10)
"""Findings on one node within this time are one failure: a GPU off the bus has an Xid, a lost GPU and more."""
MIN_P = 0.05
MAX_FAILURES = 10  # to list: the published rates follow them
MAX_PAIRS = 10  # to name of those without a result
GPUS_OF_A_NODE = 8  # in published rates


@dataclass(frozen=True)
class NodeVerdictRow:
    """The burn-in's verdict about one node, with its reasons."""

    node: str
    verdict: str
    findings: tuple[BurnInFinding, ...] = ()

    @property
    def verdict_of_tests(self) -> str:
        """Return the verdict without what befell the node meanwhile, which the clause about failures judges."""
        kinds = {finding.kind for finding in self.findings if not finding.is_warning}
        if self.verdict != judge.FAILED or kinds <= {TEST}:
            return self.verdict
        return judge.FAILED if TEST in kinds else judge.INCONCLUSIVE if GAP in kinds else judge.PASSED


@dataclass(frozen=True)
class ExpectedFailures:
    """The number of failures that a published rate predicts for the same time.

    `p` is the probability of at least the observed number.
    """

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
    """Judge what the tests of each node found. `problem`: why the burn-in ended early."""
    verdicts = {node.node: node.verdict_of_tests for node in nodes}
    passed = sum(verdict == judge.PASSED for verdict in verdicts.values())
    measured = f"{passed} of {formatting.plural(len(nodes), 'node')} passed."
    details = [
        f"{node.node}: {text}"
        for node in sorted(nodes, key=lambda node: verdicts[node.node] != judge.FAILED)
        if verdicts[node.node] != judge.PASSED
        for text in [finding.text for finding in node.findings] or [problem or "No verdict."]
    ]
    if judge.FAILED in verdicts.values():
        return ClauseOutcome(BURN_IN, FAILED, measured, tuple(details))
    if passed < len(nodes) or not nodes:
        return ClauseOutcome(BURN_IN, NOT_CHECKED, problem or measured, tuple(details))
    return ClauseOutcome(BURN_IN, PASSED, measured)


def pairs_clause(nodes: Sequence[NodeResults]) -> ClauseOutcome:
    """Judge all pairs by what either node reports; each must have a result, on GPUs if both nodes have some.

    What failed with a node that was lost is no result: the clause about failures judges the loss.
    """
    expected = list(combinations(sorted(results.node for results in nodes), 2))
    if not expected:
        return ClauseOutcome(PAIRS, NOT_APPLICABLE, "There is only one node.")
    lost = {results.node for results in nodes if results.is_node_lost}
    with_gpus = {results.node for results in nodes if results.has_gpus}
    tested: defaultdict[Pair, list[ItemSummary]] = defaultdict(list)
    failed: dict[Pair, str] = {}
    for node, test in pair_tests(nodes):
        pair = (min(node, test.item), max(node, test.item))
        if test.count <= test.absences or (test.failures and not lost.isdisjoint(pair)):
            continue
        if test.failures:
            failed.setdefault(pair, test.failure_text)
        elif ON_GPU not in test.basis and with_gpus.issuperset(pair):
            continue
        tested[pair].append(test)
    details = [f"{_pair(pair)}: {text}." for pair, text in failed.items()]
    details += [f"{_pair(pair)}: {text}." for pair, text in slow_pairs(nodes)]
    measured = f"{len(tested):,} of {formatting.plural(len(expected), 'pair')} tested{_speed_text(tested)}."
    if details:
        return ClauseOutcome(PAIRS, FAILED, measured, tuple(details))
    if missing := [_pair(pair) for pair in expected if pair not in tested]:
        on = " on their GPUs" if with_gpus else ""
        return ClauseOutcome(PAIRS, NOT_CHECKED, measured, (f"No result{on}: {'; '.join(missing[:MAX_PAIRS])}.",))
    return ClauseOutcome(PAIRS, PASSED, measured)


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
    if not count.gpus:
        text = f"{failures}. Published rates are about nodes with GPUs."
        return ClauseOutcome("failures", NOT_APPLICABLE, text, count.texts)
    if not count.hours or required is None:
        return ClauseOutcome("failures", NOT_CHECKED, f"{failures}. The tests did not run.", count.texts)
    measured = (
        f"{failures} in {count.hours:.3g} h × {formatting.plural(count.gpus, 'GPU')}; "
        f"the published rate expects {formatting.measure(required.failures)}; p = {_p(required.p)}."
    )
    others = [
        f"{expected.name} ({expected.source}) expects {formatting.measure(expected.failures)}: p = {_p(expected.p)}."
        for expected in count.expected
        if not expected.is_required
    ]
    details = [*count.texts[:MAX_FAILURES], *others]
    if len(count.texts) > MAX_FAILURES:
        details.insert(MAX_FAILURES, f"And {formatting.plural(len(count.texts) - MAX_FAILURES, 'more failure')}.")
    return ClauseOutcome("failures", FAILED if required.p < MIN_P else PASSED, measured, tuple(details))


def _p(value: float) -> str:
    return f"{value:.2g}" if value >= 0.0001 else "below 0.0001"


def _pair(pair: Pair) -> str:
    return " and ".join(pair)


def _speed_text(tested: Mapping[Pair, Sequence[ItemSummary]]) -> str:
    measured = [
        (median(test.values), test.unit, pair) for pair, tests in tested.items() for test in tests if test.values
    ]
    if not measured:
        return ""
    slowest, unit, pair = min(measured)
    low, high = formatting.measure(slowest), formatting.measure(max(measured)[0])
    return f", {low}–{high} {unit} (slowest: {_pair(pair)})" if low != high else f", {low} {unit}"
