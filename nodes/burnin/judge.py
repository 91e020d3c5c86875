"""Judge a burn-in: each node against itself, its peers in the same burn-in, and earlier burn-ins of the same model.

    failed       a test reported an error; bits differ from those of most devices; a GPU is slower than its peers
    passed       every test has a result, and none of the above
    inconclusive a test has no result, or the program did not end by itself, and nothing says that the node is at fault

How fast processors, memory and disks are depends on what else the node does; being slow there is only a warning.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from nodes.burnin.reports import FACTS, START, BurnInMachine, ItemSummary

PASSED, FAILED, INCONCLUSIVE = "passed", "failed", "inconclusive"
SLOWEST_SHARE = {"memory": 0.8, "matrix": 0.85, "copy": 0.75, "all-reduce": 0.75, "pair": 0.75}
"""Of the peers' median: a link at half its width, or a GPU that throttles, is below; their normal spread is not."""
SLOWEST_SHARE_OF_HOST = 0.5
MIN_PEERS = 2
ON_GPU = "CUDA"  # in the basis of what was measured on a GPU
_GPU = re.compile(r"GPU \d+")


@dataclass(frozen=True)
class BurnInFinding:
    """States what is wrong with a node, in one sentence. A warning does not fail it."""

    text: str
    is_warning: bool = False


@dataclass(frozen=True)
class GoldenKey:
    """Names what a golden record is for. `kind` is the test's item without the GPU's number; see `kind_of`."""

    model: str
    driver: str
    test: str
    kind: str
    basis: str


@dataclass(frozen=True)
class GoldenValue:
    """The median and the digest of passed burn-ins, and of how many."""

    count: int
    value: float | None = None
    digest: str = ""


@dataclass
class NodeResults:
    """Holds what one node reported. `ended`: its program ran to its end; `problem`: what happened to it otherwise.

    `expected_gpus`: how many GPUs the scheduler has there.
    """

    node: str
    machine: BurnInMachine | None = None
    tests: list[ItemSummary] = field(default_factory=list)
    ended: bool = False
    problem: str = ""
    is_node_lost: bool = False
    expected_gpus: int = 0

    def key(self, test: ItemSummary) -> GoldenKey:
        machine = self.machine or BurnInMachine()
        return GoldenKey(machine.model, machine.driver, test.test, kind_of(test), test.basis)


@dataclass
class NodeVerdict:
    """The verdict about one node. Its findings are sentences, the reasons to fail first."""

    verdict: str
    findings: list[BurnInFinding]


def kind_of(test: ItemSummary) -> str:
    """Return what an item is compared with: a GPU with all GPUs, a pair of GPUs only with the same pair elsewhere.

    Links between the GPUs of a node differ by design; those to the host do not.
    """
    if test.test == "pair":
        return "another node"
    return _GPU.sub("GPU", test.item) if len(_GPU.findall(test.item)) == 1 else test.item


def judge(nodes: Sequence[NodeResults], golden: Mapping[GoldenKey, GoldenValue]) -> dict[str, NodeVerdict]:
    """Return the verdict about each node, by its name."""
    found: dict[str, list[BurnInFinding]] = {results.node: [] for results in nodes}
    for results in nodes:
        found[results.node] += _reported_failures(results)
    for place, finding in (*_differing_products(nodes, golden), *_slower(nodes, golden), *_bad_pairs(nodes)):
        found[place].append(finding)
    return {results.node: _verdict(results, found[results.node]) for results in nodes}


def _verdict(results: NodeResults, findings: list[BurnInFinding]) -> NodeVerdict:
    findings = sorted(dict.fromkeys(findings), key=lambda finding: finding.is_warning)
    if results.is_node_lost:
        findings.insert(0, BurnInFinding(results.problem))
    if any(not finding.is_warning for finding in findings):
        return NodeVerdict(FAILED, findings)
    missing = "" if results.tests else "No test has a result."
    if not results.ended or missing:
        text = results.problem or missing or "The tests did not run to their end."
        return NodeVerdict(INCONCLUSIVE, [BurnInFinding(text), *findings])
    return NodeVerdict(PASSED, findings)


def _reported_failures(results: NodeResults) -> Iterable[BurnInFinding]:
    """Yield what the node's tests report by themselves; pairs are judged together."""
    if results.machine is not None and results.machine.gpus < results.expected_gpus:
        yield BurnInFinding(f"Found {results.machine.gpus} of {results.expected_gpus} GPUs.")
    for test in results.tests:
        if test.failures and test.test != "pair":
            label = "the tests could not start" if test.test in (START, FACTS) else test.test
            yield BurnInFinding(f"{_capital(test.item)}, {label}: {_detail(test)}.")
        if test.test == "matrix" and len(test.digests) > 1:
            yield BurnInFinding(
                f"{_capital(test.item)}: products of the same matrices differ from one time to the next."
            )


def _differing_products(
    nodes: Sequence[NodeResults], golden: Mapping[GoldenKey, GoldenValue]
) -> Iterable[tuple[str, BurnInFinding]]:
    """Yield devices whose products differ from those of most devices with the same model and software."""
    groups: dict[GoldenKey, list[tuple[str, str, str]]] = {}
    for results in nodes:
        for test in results.tests:
            if test.test == "matrix" and len(test.digests) == 1:
                groups.setdefault(results.key(test), []).append((results.node, test.item, test.digests[0]))
    for key, devices in groups.items():
        record = golden.get(key, GoldenValue(0))
        right, source = _right_digest([digest for _, _, digest in devices], record)
        for node, item, digest in devices:
            if right and digest != right:
                text = source or _others(sum(other == right for _, _, other in devices), item)
                yield node, BurnInFinding(f"{_capital(item)}: matrix products differ from {text}.")
            elif not right:
                yield (
                    node,
                    BurnInFinding(f"{_capital(item)}: matrix products differ between devices; none has a majority."),
                )


def _right_digest(digests: Sequence[str], record: GoldenValue) -> tuple[str, str]:
    """Return the digest that counts as right, and what it comes from if not from most devices; "" if none can tell."""
    (first, most), *_ = Counter(digests).most_common(1)
    if most == len(digests) and record.digest and record.digest != first:
        return record.digest, f"those of {record.count} earlier {_burn_ins(record.count)}"
    if most * 2 > len(digests):
        return first, ""
    if record.digest:
        return record.digest, f"those of {record.count} earlier {_burn_ins(record.count)}"
    return "", ""


def _slower(
    nodes: Sequence[NodeResults], golden: Mapping[GoldenKey, GoldenValue]
) -> Iterable[tuple[str, BurnInFinding]]:
    """Yield what is much slower than its peers, or, without enough peers, than earlier burn-ins."""
    groups: dict[GoldenKey, list[tuple[str, ItemSummary, float]]] = {}
    for results in nodes:
        for test in results.tests:
            if test.values and test.test != "mount":
                groups.setdefault(results.key(test), []).append((results.node, test, median(test.values)))
    for key, measured in groups.items():
        is_gpu = ON_GPU in key.basis
        share = SLOWEST_SHARE.get(key.test, SLOWEST_SHARE_OF_HOST) if is_gpu else SLOWEST_SHARE_OF_HOST
        peers = PeerMedians([value for _, _, value in measured])
        for node, test, value in measured:
            normal, source = _normal(peers, value, golden.get(key))
            if normal is not None and value < normal * share:
                text = f"{_capital(test.test)} {test.item}: {_figure(value)} {test.unit}, {source} {_figure(normal)}."
                yield node, BurnInFinding(text, is_warning=not is_gpu)


class PeerMedians:
    """Medians of a group's values without one of them, each in logarithmic time: groups have up to 65,000 pairs."""

    def __init__(self, values: Iterable[float]) -> None:
        self._values = sorted(values)

    def without(self, value: float) -> float | None:
        """Return the median of the others; `value` is one of the group's. None if there are no others."""
        values, place = self._values, bisect_left(self._values, value)
        count = len(values) - 1
        if count < 1:
            return None
        low, high = (count - 1) // 2, count // 2
        return (values[low + (low >= place)] + values[high + (high >= place)]) / 2

    def __len__(self) -> int:
        return len(self._values)


def _normal(peers: PeerMedians, value: float, record: GoldenValue | None) -> tuple[float | None, str]:
    if len(peers) > MIN_PEERS:
        return peers.without(value), "peers"
    if record is not None and record.value is not None:
        return record.value, "earlier burn-ins"
    return None, ""


def _bad_pairs(nodes: Sequence[NodeResults]) -> Iterable[tuple[str, BurnInFinding]]:
    """Yield failed pairs, for the node that fails with most of its partners; with one partner, for both."""
    failed: dict[str, dict[str, str]] = {results.node: {} for results in nodes}
    met: dict[str, set[str]] = {results.node: set() for results in nodes}
    for results in nodes:
        for test in results.tests:
            if test.test == "pair" and test.item in failed and test.absences < test.count:
                met[results.node].add(test.item)
                met[test.item].add(results.node)
                if test.failures:
                    failed[results.node][test.item] = failed[test.item][results.node] = _detail(test)
    for node, partners in failed.items():
        worst = {other for other in partners if len(failed[other]) * 2 > len(met[other]) > 1}
        is_worst = len(partners) * 2 > len(met[node]) > 1
        for partner, detail in partners.items():
            if partner in worst and not is_worst:
                continue  # that node fails with others, too
            yield node, BurnInFinding(f"All-reduce with {partner}: {detail}.")


def _detail(test: ItemSummary) -> str:
    times = f" ({test.failures:,} of {test.count:,} times)" if test.count > 1 else ""
    return f"{test.detail.rstrip('.') or 'failed'}{times}"


def _others(count: int, item: str) -> str:
    thing = "GPU" if item.startswith("GPU") else "node"
    return f"those of {count} other {thing}{'s' * (count != 1)}"


def _burn_ins(count: int) -> str:
    return "burn-in" if count == 1 else "burn-ins"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:] if not text.startswith("/") else text


def _figure(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
