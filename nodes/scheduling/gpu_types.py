"""Count the GPUs of each type that a node has, uses and has free. Pure; for a NodeStatus and for its row.

A node may have several types at once: `Gres=gpu:a100:1,gpu:1g.10gb:7`; "" is the type of GPUs that have none.

Types are compared without regard to case. Slurm itself writes them in lower case in TRES (accounting, limits, a job's
request), and accepts `gpu:H100:1` only if a node is configured as `H100`: submissions use the node's spelling.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol


class HasGpus(Protocol):
    @property
    def gpus(self) -> int: ...
    @property
    def gpus_used(self) -> int: ...
    @property
    def gpu_type(self) -> str: ...
    @property
    def gpus_by_type(self) -> Mapping[str, int]: ...
    @property
    def gpus_used_by_type(self) -> Mapping[str, int]: ...


def installed(node: HasGpus) -> Mapping[str, int]:
    """Return how many of each type the node has."""
    return node.gpus_by_type or ({node.gpu_type: node.gpus} if node.gpus else {})


def used(node: HasGpus) -> Mapping[str, int]:
    """Return how many of each type are allocated."""
    return node.gpus_used_by_type if node.gpus_by_type else {node.gpu_type: node.gpus_used} if node.gpus else {}


def free(node: HasGpus) -> dict[str, int]:
    """Return how many of each type are not allocated."""
    taken = used(node)
    return {kind: max(0, count - taken.get(kind, 0)) for kind, count in installed(node).items()}


def count_of(counts: Mapping[str, int], wanted: str) -> int:
    """Return how many are of the wanted type; all for "", which any type satisfies."""
    if not wanted:
        return sum(counts.values())
    return sum(count for kind, count in counts.items() if kind.lower() == wanted.lower())


def has(node: HasGpus, wanted: str) -> bool:
    """Return whether the node has GPUs of the wanted type, free or not."""
    return count_of(installed(node), wanted) > 0


def names(nodes: Iterable[HasGpus]) -> list[str]:
    """Return every type that these nodes have, sorted; GPUs without a type have none."""
    return sorted({kind for node in nodes for kind, count in installed(node).items() if kind and count})


def spelling(wanted: str, available: Iterable[str]) -> str:
    """Return the matching known type as the scheduler spells it: "h100" for "H100"; "" if there is none."""
    alike = sorted(name for name in available if name.lower() == wanted.lower())
    return wanted if wanted in alike else next(iter(alike), "")


def text(node: HasGpus) -> str:
    """Return the type of its GPUs; "1 a100, 7 1g.10gb" if it has several."""
    counts = installed(node)
    if len(counts) < 2:
        return "".join(counts)
    return ", ".join(f"{count} {kind or 'without a type'}" for kind, count in counts.items())
