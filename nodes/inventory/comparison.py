"""Group the versions on all nodes, and find those that differ from their peers' or are below a minimum.

Peers are nodes of the same partition whose GPUs are of the same model. Each node has one vote per software, however
many GPUs or adapters it reports: the version that most of its own have. No Django.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from nodes.inventory.minimums import MinimumVersion, MinimumVersions
from nodes.inventory.software import TITLES, NodeSoftware, Software

MIN_PEERS = 3
"""Nodes whose versions are compared; within a node, GPUs or adapters."""
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
    """The version of its peers, or of the node's other GPUs or adapters; "" if it does not differ, or none is usual."""
    minimum: MinimumVersion | None = None


@dataclass
class VersionGroup:
    """The nodes that have one version."""

    version: str
    nodes: list[str] = field(default_factory=list)
    odd: set[str] = field(default_factory=set)
    """Those among them whose peers have another version."""
    minimum: MinimumVersion | None = None
    is_judged: bool = True
    """Whether a minimum, if its software has any, is about its branch."""


@dataclass
class SoftwareGroup:
    """The versions of one kind of software, the most frequent first."""

    software: Software
    versions: list[VersionGroup]


@dataclass(frozen=True)
class MixedVersions:
    """Peers that have different versions of a software, none of them usual."""

    software: Software
    partition: str
    model: str
    counts: Sequence[tuple[str, int]]
    """Nodes by version, the most frequent first."""


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
    def mixed(self) -> list[MixedVersions]:
        """Return where nobody can say which version is odd, such as halfway through an upgrade."""
        found: defaultdict[tuple[tuple[str, str], Software], Counter[str]] = defaultdict(Counter)
        for node in self.nodes:
            for software, installed in node.versions.items():
                if (node.peers, software) not in self.usual:
                    found[node.peers, software].update({majority(installed)} - {""} or set(installed))
        order = {name: place for place, name in enumerate(TITLES)}
        rows = sorted(found.items(), key=lambda item: (order[item[0][1].name], item[0][1].part, item[0][0]))
        return [
            MixedVersions(software, *peers, sorted(counts.items(), key=lambda item: (-item[1], item[0])))
            for (peers, software), counts in rows
            if len(counts) > 1
        ]

    @cached_property
    def alone(self) -> list[str]:
        """Return the nodes that have too few peers to be compared with."""
        numbers = Counter(node.peers for node in self.nodes)
        return [node.node for node in self.nodes if numbers[node.peers] < MIN_PEERS]

    @cached_property
    def groups(self) -> list[SoftwareGroup]:
        by_software: defaultdict[Software, dict[str, VersionGroup]] = defaultdict(dict)
        for node in self.nodes:
            for software, installed in node.versions.items():
                for version in dict.fromkeys(installed):
                    group = by_software[software].setdefault(version, VersionGroup(version))
                    group.nodes.append(node.node)
                    group.is_judged &= self.minimum_versions.judges(software, node.model, version)
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
    """Return the version that most peers have, where there is a clear majority of three nodes or more."""
    votes: defaultdict[tuple[tuple[str, str], Software], list[str]] = defaultdict(list)
    for node in nodes:
        for software, installed in node.versions.items():
            votes[node.peers, software].append(majority(installed))
    return {
        key: usual for key, versions in votes.items() if len(versions) >= MIN_PEERS and (usual := majority(versions))
    }


def expected_version(node: NodeSoftware, software: Software, usual: UsualVersions) -> str:
    """Return the version that the node should have: its peers' or, without, that of most of its GPUs or adapters."""
    installed = node.versions[software]
    return usual.get((node.peers, software), "") or (majority(installed) if len(installed) >= MIN_PEERS else "")


def node_findings(node: NodeSoftware, usual: UsualVersions, minimum_versions: MinimumVersions) -> list[VersionFinding]:
    """Return what needs attention on one node."""
    found = []
    for software, installed in node.versions.items():
        expected = expected_version(node, software, usual)
        for version in dict.fromkeys(installed):
            minimum = minimum_versions.violated(software, node.model, version)
            other = expected if version != expected else ""
            if minimum is not None or other:
                found.append(VersionFinding(node.node, software, version, other, minimum))
    return found


def majority(versions: Sequence[str]) -> str:
    """Return the version that at least 60 % of them are; "" if there is none."""
    if versions.count(versions[0]) == len(versions):  # nearly always
        return versions[0]
    version, number = Counter(versions).most_common(1)[0]
    return version if number >= MAJORITY * len(versions) else ""
