"""Describe what a burn-in is judged by: each node's results, earlier burn-ins of its model, and what was found."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from nodes.burnin.reports import BurnInMachine, ItemSummary

MIN_NODES = 3
"""A golden record of at least this many passed nodes can fail others. A younger one only warns."""
ON_GPU = "CUDA"  # in the basis of what was measured on a GPU
TEST, EVENT, GAP = "test", "event", "gap"
"""Kinds of findings: what a test measured; what befell the node meanwhile; that there is no result."""
_GPU = re.compile(r"GPU \d+")


@dataclass(frozen=True)
class BurnInFinding:
    """States what is wrong with a node, in one sentence. A warning does not fail it."""

    text: str
    is_warning: bool = False
    kind: str = TEST


@dataclass(frozen=True)
class GoldenKey:
    """Names what a golden record is for. `kind` is the test's item without the GPU's number; see `kind_of`."""

    model: str
    driver: str
    test: str
    kind: str
    basis: str

    @property
    def is_gpu(self) -> bool:
        return ON_GPU in self.basis


@dataclass(frozen=True)
class GoldenValue:
    """The median and the digest of passed burn-ins, and of how many nodes."""

    count: int
    value: float | None = None
    digest: str = ""

    @property
    def is_strong(self) -> bool:
        return self.count >= MIN_NODES

    @property
    def source(self) -> str:
        return f"{self.count:,} earlier {'burn-in' if self.count == 1 else 'burn-ins'}"


@dataclass
class NodeResults:
    """Holds what one node reported. `ended`: its program ran to its end; `problem`: what happened to it otherwise.

    `expected_gpus`: how many GPUs the scheduler has there. `listed_gpus`: how many its agent lists.
    """

    node: str
    machine: BurnInMachine | None = None
    tests: list[ItemSummary] = field(default_factory=list)
    ended: bool = False
    problem: str = ""
    is_node_lost: bool = False
    expected_gpus: int = 0
    listed_gpus: int = 0

    @property
    def has_gpus(self) -> bool:
        return self.expected_gpus > 0 or (self.machine is not None and self.machine.gpus > 0)

    def key(self, test: ItemSummary) -> GoldenKey:
        machine = self.machine or BurnInMachine()
        return GoldenKey(machine.model, machine.driver, test.test, kind_of(test), test.basis)


def kind_of(test: ItemSummary) -> str:
    """Return what an item is compared with: a GPU with all GPUs, a pair of GPUs only with the same pair elsewhere.

    Links between the GPUs of a node differ by design. Links to the host differ less between the sockets of a node than
    SLOWEST_SHARE allows for.
    """
    if test.test == "pair":
        return "another node"
    return _GPU.sub("GPU", test.item) if len(_GPU.findall(test.item)) == 1 else test.item


def capital(text: str) -> str:
    return text[:1].upper() + text[1:] if not text.startswith("/") else text


def figure(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"
