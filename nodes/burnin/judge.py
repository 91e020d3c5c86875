"""Judge a burn-in: each node against itself, its peers in the same burn-in, and earlier burn-ins of the same model.

    failed       a test reported an error; bits differ from those of most devices; a GPU or a link is slower than others
    passed       every test has a result, and none of the above
    inconclusive a test has no result, or the program did not end by itself, and nothing says that the node is at fault:
                 also where the tests start on no node, because of the software

Warnings change no verdict.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from nodes.burnin.evidence import EVENT, GAP, BurnInFinding, GoldenKey, GoldenValue, NodeResults, capital
from nodes.burnin.mounts import differing_mounts
from nodes.burnin.pairs import bad_pairs
from nodes.burnin.products import differing_products
from nodes.burnin.reports import FACTS, START, ItemSummary
from nodes.burnin.speeds import slow_items
from vigil_core import formatting

PASSED, FAILED, INCONCLUSIVE = "passed", "failed", "inconclusive"
MAX_WHOLE_GPUS = 16
"""A scheduler that lists more on one node lists MIG slices."""
MISSING_MODULE = "ModuleNotFoundError"
"""In the last line that a Python prints which lacks torch or numpy."""


@dataclass
class NodeVerdict:
    """The verdict about one node. Its findings are sentences, the reasons to fail first."""

    verdict: str
    findings: list[BurnInFinding]
    is_node_lost: bool = False


def judge(nodes: Sequence[NodeResults], golden: Mapping[GoldenKey, GoldenValue]) -> dict[str, NodeVerdict]:
    """Return the verdict about each node, by its name."""
    names = {results.node for results in nodes}
    unstarted = _start_problems(nodes)
    found = {results.node: list(_reported_failures(results, names, unstarted)) for results in nodes}
    for node, finding in (
        *differing_products(nodes, golden), *slow_items(nodes, golden), *differing_mounts(nodes),
    ):  # fmt: skip
        found[node].append(finding)
    faulty = {results.node for results in nodes if _is_faulty(results, found[results.node])}
    lost = {results.node for results in nodes if results.is_node_lost}
    for node, finding in bad_pairs(nodes, golden, faulty):
        found[node].append(replace(finding, kind=EVENT) if node in lost else finding)
    return {results.node: _verdict(results, found[results.node], unstarted.get(results.node, "")) for results in nodes}


def _start_problems(nodes: Iterable[NodeResults]) -> dict[str, str]:
    """Return why tests could not start, by node, where the software is to blame because no node got further.

    A node that is tested alone may be at fault itself, unless its Python lacks a module.
    """
    reporting = [results for results in nodes if results.tests]
    failures = {
        results.node: test
        for results in reporting
        for test in results.tests
        if test.test == START and test.failures and results.machine is None
    }
    if len(failures) < len(reporting):
        return {}
    is_same = len(failures) > 1 and len({test.detail for test in failures.values()}) == 1
    return {
        node: f"The tests could not start: {test.failure_text}."
        for node, test in failures.items()
        if is_same or MISSING_MODULE in test.detail
    }


def _is_faulty(results: NodeResults, findings: Iterable[BurnInFinding]) -> bool:
    """Return whether something is wrong with a node besides its pairs."""
    return results.is_node_lost or not results.ended or any(not finding.is_warning for finding in findings)


def _verdict(results: NodeResults, findings: list[BurnInFinding], start_problem: str) -> NodeVerdict:
    findings = sorted(dict.fromkeys(findings), key=lambda finding: finding.is_warning)
    if results.is_node_lost:
        findings.insert(0, BurnInFinding(results.problem, kind=GAP))
    if any(not finding.is_warning for finding in findings):
        return NodeVerdict(FAILED, findings, is_node_lost=results.is_node_lost)
    missing = _untested(results) if results.ended else results.problem or "The tests did not run to their end."
    if unknown := start_problem or missing:
        return NodeVerdict(INCONCLUSIVE, [BurnInFinding(unknown, kind=GAP), *findings])
    return NodeVerdict(PASSED, findings)


def _reported_failures(results: NodeResults, names: Set[str], unstarted: Container[str]) -> Iterable[BurnInFinding]:
    """Yield what the node's tests report by themselves; pairs are judged together, and so is what did not start."""
    machine = results.machine
    if machine is not None and machine.gpus < results.expected_gpus and not _has_slices(results):
        yield BurnInFinding(f"Found {machine.gpus} of {results.expected_gpus} GPUs.")
    elsewhere = {"pair", START} if results.node in unstarted else {"pair"}
    for test in results.tests:
        if test.failures and test.test not in elsewhere:
            yield BurnInFinding(f"{_title(test, names)}: {test.failure_text}.")
        if test.test == "matrix" and len(test.digests) > 1:
            item = capital(test.item)
            yield BurnInFinding(f"{item}: products of the same matrices differ from one time to the next.")


def _title(test: ItemSummary, names: Set[str]) -> str:
    if test.test not in (START, FACTS):
        return f"{capital(test.item)}, {test.test}"
    if test.item in names:  # this node's part of a pair
        return f"All-reduce with {test.item} could not start"
    return f"{capital(test.item)}, the tests could not start"


def _has_slices(results: NodeResults) -> bool:
    """Return whether the node's GPUs are cut into MIG slices, of which a process can use only one."""
    machine = results.machine
    return machine is not None and (
        "MIG" in machine.gpu_model.split() or machine.gpus < results.expected_gpus > MAX_WHOLE_GPUS
    )


def _untested(results: NodeResults) -> str:
    """Return what has no result, in a sentence; "" if every test has one."""
    if not results.tests or results.machine is None:
        return "No test has a result." if not results.tests else "The node did not report its GPUs and software."
    if _has_slices(results):
        return "Its GPUs are cut into MIG slices, of which only one can be tested. Turn MIG off for a burn-in."
    if results.listed_gpus and not results.machine.gpus:
        return f"Its agent lists {formatting.plural(results.listed_gpus, 'GPU')}, none of which was tested."
    counts = Counter(test.test for test in results.tests if test.count > test.absences)
    missing = [
        f"{name} ({counts[name]} of {expected})" if expected > 1 else name
        for name, expected in _expected_items(results.machine.gpus).items()
        if counts[name] < expected
    ]
    return f"Results are missing: {', '.join(missing)}." if missing else ""


def _expected_items(gpus: int) -> dict[str, int]:
    """Return how many items each test has. Without GPUs the CPUs are one device, with two ranks."""
    found = {"memory": gpus or 1, "matrix": gpus or 1, "copy": gpus * (gpus + 1) or 1}
    if gpus != 1:
        found["all-reduce"] = 1
    return found | {"host memory": 1, "disk": 2}
