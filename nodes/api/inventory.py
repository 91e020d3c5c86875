"""REST: which versions of software and firmware the nodes have."""

from __future__ import annotations

from typing import Any

from ninja import Query, Router, Schema
from pydantic import Field

from nodes import software_inventory
from nodes.inventory.comparison import Inventory, MixedVersions, SoftwareGroup, VersionFinding, VersionGroup
from nodes.inventory.minimums import MinimumVersion
from nodes.inventory.software import NodeSoftware, Software
from portal.http.api import ApiRequest, PageQuery, Text
from portal.http.openapi import described
from portal.http.paging import SortOrder, page

router = Router(tags=["nodes"])
MAX_SOFTWARE, MAX_VERSIONS, MAX_NAMES, MAX_FINDINGS = 100, 100, 1_000, 1_000


class MinimumShape(Schema):
    """Describes a minimum version, and why."""

    software: str
    branch: str = Field(description="It is about versions that begin so; empty: all.")
    models: list[str] = Field(description="It is about GPUs or adapters with one of these texts in their name.")
    version: str
    why: str
    source: str
    is_site: bool = Field(description="It is the site's own, not one of those that ship with Vigil.")


class VersionShape(Schema):
    """Describes which nodes have one version."""

    version: str
    count: int = Field(description="Nodes with it.")
    nodes: list[str] = Field(description="The first 1,000 by name; GET /inventory/nodes has all.")
    odd: list[str] = Field(description="Those whose peers have another version.")
    minimum: MinimumShape | None = Field(description="The minimum that it is below.")
    is_judged: bool = Field(description="False: minimums exist for other branches of the software, not for this one.")


class SoftwareShape(Schema):
    """Describes the versions of one software, the most frequent first."""

    software: str
    part: str = Field(description="The model of GPU or adapter whose firmware it is; empty: the node's own software.")
    title: str
    versions: list[VersionShape]


class VersionFindingShape(Schema):
    """Describes a version that needs attention."""

    node: str
    software: str
    part: str
    version: str
    usual: str = Field(description="The version of its peers; empty: it does not differ from theirs.")
    minimum: MinimumShape | None


class CountShape(Schema):
    version: str
    count: int = Field(description="Nodes with it.")


class MixedVersionsShape(Schema):
    """Describes peers that have different versions of a software, none of them usual."""

    software: str
    part: str
    partition: str
    model: str
    versions: list[CountShape]


class InventoryShape(Schema):
    """Describes the software of all nodes."""

    nodes: int = Field(description="Nodes whose agent has reported in the last 30 days.")
    items: list[SoftwareShape]
    findings: list[VersionFindingShape] = Field(description="What needs attention; below a minimum first.")
    more_findings: int
    mixed: list[MixedVersionsShape] = Field(description="Where no version is usual, so none is odd; the first 100.")
    minimums: list[MinimumShape]
    problem: str = Field(description="Why the site's own minimum versions cannot be read; empty: they can.")


class InstalledShape(Schema):
    software: str
    part: str
    versions: list[str]


class NodeSoftwareShape(Schema):
    """Describes the software of one node."""

    node: str
    partition: str = Field(description="Its first one: nodes are compared with those of the same partition and model.")
    model: str = Field(description="Of its GPUs.")
    software: list[InstalledShape]


class NodeSoftwareList(Schema):
    items: list[NodeSoftwareShape]
    next: str | None = None


class NodeSoftwareQuery(PageQuery):
    software: Text = Field("", description="Only nodes that have this software, such as driver.")
    version: Text = Field("", description="Only nodes that have this version of some software.")


@router.get(
    "", response=InventoryShape, summary="Versions of software on all nodes", openapi_extra=described(errors={})
)
def inventory(request: ApiRequest) -> dict[str, Any]:
    """Group nodes by version, and name those that differ from nodes of the same partition and model of GPU."""
    found, (minimums, problem) = software_inventory.recent_inventory(), software_inventory.site_minimums()
    return {
        "nodes": len(found.nodes),
        "items": [_group_shape(group) for group in found.groups[:MAX_SOFTWARE]],
        "findings": [_finding_shape(finding) for finding in found.findings[:MAX_FINDINGS]],
        "more_findings": max(0, len(found.findings) - MAX_FINDINGS),
        "mixed": [_mixed_shape(mixed) for mixed in found.mixed[:MAX_SOFTWARE]],
        "minimums": [_minimum_shape(minimum) for minimum in minimums.items],
        "problem": problem,
    }


@router.get("/nodes", response=NodeSoftwareList, summary="Versions of software, node by node")
def nodes(request: ApiRequest, query: Query[NodeSoftwareQuery]) -> dict[str, Any]:
    """List nodes by name with every version that their agent last reported."""
    agents = software_inventory.reporting_agents().only("node", "facts")
    if query.software or query.version:
        agents = agents.filter(node__in=_matching(software_inventory.recent_inventory(), query))
    found = page(agents, SortOrder("node"), cursor=query.cursor, limit=query.limit)
    return {"items": [_node_shape(node) for node in software_inventory.read_nodes(found.items)], "next": found.next}


def _matching(inventory: Inventory, query: NodeSoftwareQuery) -> list[str]:
    """Return the names of the nodes that have the software and version."""
    return [
        node.node
        for node in inventory.nodes
        if any(
            query.software in ("", item.name) and (not query.version or query.version in versions)
            for item, versions in node.versions.items()
        )
    ]


def _node_shape(node: NodeSoftware) -> dict[str, Any]:
    return {
        "node": node.node,
        "partition": node.partition,
        "model": node.model,
        "software": [
            {**_names(item), "versions": list(dict.fromkeys(versions))} for item, versions in node.versions.items()
        ],
    }


def _group_shape(group: SoftwareGroup) -> dict[str, Any]:
    return {
        **_names(group.software),
        "title": group.software.title,
        "versions": [_version_shape(version) for version in group.versions[:MAX_VERSIONS]],
    }


def _version_shape(group: VersionGroup) -> dict[str, Any]:
    return {
        "version": group.version,
        "count": len(group.nodes),
        "nodes": group.nodes[:MAX_NAMES],
        "odd": sorted(group.odd)[:MAX_NAMES],
        "minimum": _minimum_shape(group.minimum),
        "is_judged": group.is_judged,
    }


def _finding_shape(finding: VersionFinding) -> dict[str, Any]:
    return {
        "node": finding.node,
        **_names(finding.software),
        "version": finding.version,
        "usual": finding.usual,
        "minimum": _minimum_shape(finding.minimum),
    }


def _mixed_shape(mixed: MixedVersions) -> dict[str, Any]:
    counts = [{"version": version, "count": count} for version, count in mixed.counts[:MAX_VERSIONS]]
    return {**_names(mixed.software), "partition": mixed.partition, "model": mixed.model, "versions": counts}


def _names(item: Software) -> dict[str, str]:
    return {"software": item.name, "part": item.part}


def _minimum_shape(minimum: MinimumVersion | None) -> dict[str, Any] | None:
    if minimum is None:
        return None
    copied = ("software", "branch", "version", "why", "source", "is_site")
    return {name: getattr(minimum, name) for name in copied} | {"models": list(minimum.models)}
