"""Read which versions a node's agent reported. What it reports is not trusted: texts and lists are bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from vigil_core import untrusted

MAX_GPUS, MAX_ADAPTERS = 64, 32
LONGEST_VERSION, LONGEST_MODEL = 128, 128
TITLES: Mapping[str, str] = {
    "driver": "NVIDIA driver",
    "cuda": "CUDA of the driver",
    "nccl": "NCCL",
    "fabric_manager": "Fabric manager",
    "container_toolkit": "NVIDIA Container Toolkit",
    "vbios": "VBIOS",
    "inforom": "InfoROM",
    "hca": "InfiniBand adapter firmware",
    "kernel": "Kernel",
    "system": "Operating system",
    "slurm": "Slurm",
    "agent": "Vigil agent",
}
"""Software by the name that the agent, REST and minimum versions use, in the order of the page."""
UNORDERED = frozenset({"inforom", "system"})
"""Software of which no version is newer than another."""
HEXADECIMAL = frozenset({"vbios"})
_OF_NODE = tuple(name for name in TITLES if name not in ("vbios", "inforom", "hca"))


class Software(NamedTuple):
    """One kind of software; `part`: the model of GPU or adapter that has this firmware, "" for the node's own."""

    name: str
    part: str = ""

    @property
    def title(self) -> str:
        return f"{TITLES[self.name]} of {self.part}" if self.part else TITLES[self.name]


@dataclass(frozen=True)
class NodeSoftware:
    """The versions on one node. Firmware has a version for each GPU or adapter."""

    node: str
    partition: str
    model: str
    """Of most of its GPUs; "" without any."""
    versions: Mapping[Software, tuple[str, ...]]

    @property
    def peers(self) -> tuple[str, str]:
        """Return what nodes must share for their versions to be compared."""
        return self.partition, self.model


def read_facts(node: str, partition: str, facts: Mapping[str, Any]) -> NodeSoftware:
    """Return the versions that an agent's facts name."""
    found: dict[Software, list[str]] = {}
    for software, version in _reported(facts):
        if version:
            found.setdefault(software, []).append(version)
    models = Counter(
        untrusted.line(gpu.get("name"), LONGEST_MODEL) for gpu in untrusted.tables(facts.get("gpus"))[:MAX_GPUS]
    )
    model = models.most_common(1)[0][0] if models else ""
    return NodeSoftware(node, partition, model, {software: tuple(versions) for software, versions in found.items()})


def _reported(facts: Mapping[str, Any]) -> Iterator[tuple[Software, str]]:
    for name in _OF_NODE:
        yield Software(name), untrusted.line(facts.get(name), LONGEST_VERSION)
    for gpu in untrusted.tables(facts.get("gpus"))[:MAX_GPUS]:
        model = untrusted.line(gpu.get("name"), LONGEST_MODEL)
        for name in ("vbios", "inforom"):
            yield Software(name, model), untrusted.line(gpu.get(name), LONGEST_VERSION)
    for adapter in untrusted.tables(facts.get("adapters"))[:MAX_ADAPTERS]:
        board = untrusted.line(adapter.get("board"), LONGEST_MODEL)
        yield Software("hca", board), untrusted.line(adapter.get("firmware"), LONGEST_VERSION)
