"""Find devices whose matrix products differ in a bit from those that count as right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from nodes.burnin.evidence import BurnInFinding, GoldenKey, GoldenValue, NodeResults, capital
from nodes.burnin.speeds import RESET

Device = tuple[str, str, str]
"""Node, item and digest."""


def differing_products(
    nodes: Sequence[NodeResults], golden: Mapping[GoldenKey, GoldenValue]
) -> Iterable[tuple[str, BurnInFinding]]:
    """Yield devices whose products differ from those of most devices with the same model and software."""
    groups: dict[GoldenKey, list[Device]] = {}
    for results in nodes:
        for test in results.tests:
            if test.test == "matrix" and len(test.digests) == 1:
                groups.setdefault(results.key(test), []).append((results.node, test.item, test.digests[0]))
    for key, devices in groups.items():
        yield from _judge_group(devices, golden.get(key, GoldenValue(0)))


def _judge_group(devices: Sequence[Device], record: GoldenValue) -> Iterable[tuple[str, BurnInFinding]]:
    right = _right_digest(devices, record)
    count = sum(digest == right for _, _, digest in devices)
    for node, item, digest in devices:
        if not right:
            yield node, BurnInFinding(f"{capital(item)}: matrix products differ between devices; none has a majority.")
        elif digest != right:
            those = f"those of {record.source}" if right == record.digest and count * 2 <= len(devices) else None
            yield node, BurnInFinding(f"{capital(item)}: matrix products differ from {those or _others(count, item)}.")
        elif record.digest not in ("", right):
            text = f"Matrix products differ from those of {record.source}. {RESET}"
            yield node, BurnInFinding(text, is_warning=True)


def _right_digest(devices: Sequence[Device], record: GoldenValue) -> str:
    """Return the digest that counts as right; "" if none can tell.

    Two nodes do not fail in the same bits, so most devices outvote the record if they are on several nodes: the record
    was made by a bad device, or with other software. On a single node a record of enough burn-ins decides.
    """
    (most_common, count), *_ = Counter(digest for _, _, digest in devices).most_common(1)
    has_majority = count * 2 > len(devices)
    if has_majority and len({node for node, _, digest in devices if digest == most_common}) > 1:
        return most_common
    if record.digest and record.is_strong:
        return record.digest
    if has_majority:
        return most_common
    return record.digest if any(digest == record.digest for _, _, digest in devices) else ""


def _others(count: int, item: str) -> str:
    thing = "GPU" if item.startswith("GPU") else "node"
    return f"those of {count} other {thing}{'s' * (count != 1)}"
