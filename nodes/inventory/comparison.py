"""Group the versions on all nodes, and find those that differ from their peers' or are below a minimum.

Peers are nodes of the same partition whose GPUs are of the same model. No Django.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from nodes.inventory.minimums import MinimumVersion, MinimumVersions
from nodes.inventory.software import TITLES, NodeSoftware, Software

LEAST_PEERS = 2
MAJORITY = 0.6
UsualVersions = Mapping[tuple[tuple[str, str], Software], str]
"""The version that most peers have, by peers and software."""


@dataclass(frozen=True)
class VersionFinding:
    """A version on a node that needs attention: another one than its peers', or below a minimum, or both."""

    node: str
    software: Software
    version: str
    usual: str = ""
    """The version of its peers; "" if it does not differ, or they have no common one."""
    minimum: MinimumVersion | None = None


@dataclass
class VersionGroup:
    """The nodes that have one version."""

    version: str
    nodes: list[str] = field(default_factory=list)
    odd: set[str] = field(default_factory=set)
    """Those among them whose peers have another version."""
    minimum: MinimumVersion | None = None


@dataclass
class SoftwareGroup:
    """The versions of one kind of software, the most frequent first."""

    software: Software
    versions: list[VersionGroup]


@dataclass(frozen=True)
class Inventory:
    """The software on all nodes."""

    nodes: Sequence[NodeSoftware]
    minimum_versions: MinimumVersions

    @cached_property
    def usual(self) -> UsualVersions:
        return usual_versions(self.nodes)

    @cached_property
    def findings(self) -> list[VersionFinding]:
        """Return what needs attention: below a minimum first, then by software and node."""
        found = [finding for node in self.nodes for finding in node_findings(node, self.usual, self.minimum_versions)]
        order = {name: place for place, name in enumerate(TITLES)}
        return sorted(
            found, key=lambda item: (item.minimum is None, order[item.software.name], item.node, item.version)
        )

    @cached_property
    def groups(self) -> list[SoftwareGroup]:
        by_software: defaultdict[Software, dict[str, VersionGroup]] = defaultdict(dict)
        for node in self.nodes:
            for software, installed in node.versions.items():
                for version in dict.fromkeys(installed):
                    by_software[software].setdefault(version, VersionGroup(version)).nodes.append(node.node)
        for finding in self.findings:
            group = by_software[finding.software][finding.version]
            group.minimum = finding.minimum or group.minimum
            if finding.usual:
                group.odd.add(finding.node)
        order = {name: place for place, name in enumerate(TITLES)}
        return [
            SoftwareGroup(software, sorted(found.values(), key=lambda group: (-len(group.nodes), group.version)))
            for software, found in sorted(by_software.items(), key=lambda item: (order[item[0].name], item[0].part))
        ]


def usual_versions(nodes: Iterable[NodeSoftware]) -> UsualVersions:
    """Return the version that most peers have, where there is a clear majority."""
    found: defaultdict[tuple[tuple[str, str], Software], Counter[str]] = defaultdict(Counter)
    for node in nodes:
        for software, installed in node.versions.items():
            found[node.peers, software].update(installed)
    return {key: usual for key, counts in found.items() if (usual := majority(counts))}


def node_findings(node: NodeSoftware, usual: UsualVersions, minimum_versions: MinimumVersions) -> list[VersionFinding]:
    """Return what needs attention on one node."""
    found = []
    for software, installed in node.versions.items():
        expected = usual.get((node.peers, software), "")
        for version in dict.fromkeys(installed):
            minimum = minimum_versions.violated(software, node.model, version)
            other = expected if version != expected else ""
            if minimum is not None or other:
                found.append(VersionFinding(node.node, software, version, other, minimum))
    return found


def majority(counts: Counter[str]) -> str:
    """Return the version that most have; "" if there are too few, or no clear majority."""
    if not counts or counts.total() <= LEAST_PEERS:
        return ""
    version, number = counts.most_common(1)[0]
    return version if number >= MAJORITY * counts.total() else ""
