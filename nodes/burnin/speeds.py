"""Find what is slow: compared with its peers in the same burn-in, and with earlier burn-ins of the same model.

A golden record decides only where this burn-in cannot: without peers, or where all are on one node, which may be slow
as a whole. Where peers on several nodes agree, what they have in common is no fault of one node; then it only warns.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from nodes.burnin.evidence import BurnInFinding, GoldenKey, GoldenValue, NodeResults, capital, figure
from nodes.burnin.reports import MOUNT, ItemSummary

SLOWEST_SHARE = {"memory": 0.8, "matrix": 0.85, "copy": 0.75, "all-reduce": 0.75, "pair": 0.75}
"""The share of the peers' median below which a result is slow. A link at half its width, or a GPU that throttles, is
below; the normal spread of peers is not."""
SLOWEST_SHARE_OF_HOST = 0.5
MIN_PEERS = 2
RESET = "If that is normal now, delete the golden record on the page Burn-ins."
_ELSEWHERE = (MOUNT, "pair")


class PeerMedians:
    """Medians of a group's values without some of them, in logarithmic time: groups have up to 65,000 pairs."""

    def __init__(self, values: Iterable[float]) -> None:
        self._values = sorted(values)

    def without(self, *values: float) -> float | None:
        """Return the median of the others; `values` are some of the group's. None if there are no others."""
        count = len(self._values) - len(values)
        if count < 1:
            return None
        removed: list[int] = []
        for value in sorted(values):
            removed.append(max(bisect_left(self._values, value), removed[-1] + 1 if removed else 0))
        return (self._remaining((count - 1) // 2, removed) + self._remaining(count // 2, removed)) / 2

    def _remaining(self, place: int, removed: Sequence[int]) -> float:
        for index in removed:
            place += index <= place
        return self._values[place]

    def __len__(self) -> int:
        return len(self._values)


def is_slow(key: GoldenKey, value: float, normal: float) -> bool:
    share = SLOWEST_SHARE.get(key.test, SLOWEST_SHARE_OF_HOST) if key.is_gpu else SLOWEST_SHARE_OF_HOST
    return value < normal * share


def slow_items(
    nodes: Sequence[NodeResults], golden: Mapping[GoldenKey, GoldenValue]
) -> Iterable[tuple[str, BurnInFinding]]:
    """Yield what is much slower than its peers or than earlier burn-ins, with the node that it is on.

    How fast processors, memory and disks are depends on what else the node does; being slow there is only a warning.
    """
    groups: dict[GoldenKey, list[tuple[str, ItemSummary, float]]] = {}
    for results in nodes:
        for test in results.tests:
            if test.values and test.test not in _ELSEWHERE:
                groups.setdefault(results.key(test), []).append((results.node, test, median(test.values)))
    for key, measured in groups.items():
        peers = PeerMedians(value for _, _, value in measured)
        is_one_node = len({node for node, _, _ in measured}) == 1
        for node, test, value in measured:
            normal = peers.without(value) if len(peers) > MIN_PEERS else None
            if normal is not None and is_slow(key, value, normal):
                yield node, _finding(key, test, value, f"peers {figure(normal)}")
            elif found := _below_record(key, test, value, golden.get(key), decides=normal is None or is_one_node):
                yield node, found


def record_warning(key: GoldenKey, unit: str, record: GoldenValue) -> BurnInFinding:
    """Say once for each node that a whole kind of item is slower than in earlier burn-ins."""
    item = f"{capital(key.test)} {key.kind}" if key.test != "pair" else "All-reduce with other nodes"
    text = f"{item}: slower than the {figure(record.value or 0.0)} {unit} of {record.source}. {RESET}"
    return BurnInFinding(text, is_warning=True)


def _below_record(
    key: GoldenKey, test: ItemSummary, value: float, record: GoldenValue | None, *, decides: bool
) -> BurnInFinding | None:
    if record is None or record.value is None or not is_slow(key, value, record.value):
        return None
    if decides and (record.is_strong or not key.is_gpu):
        return _finding(key, test, value, f"earlier burn-ins {figure(record.value)}")
    return record_warning(key, test.unit, record) if key.is_gpu else None


def _finding(key: GoldenKey, test: ItemSummary, value: float, normal: str) -> BurnInFinding:
    text = f"{capital(test.test)} {test.item}: {figure(value)} {test.unit}, {normal}."
    return BurnInFinding(text, is_warning=not key.is_gpu)
