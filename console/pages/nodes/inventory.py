"""Render /inventory: the versions of software and firmware on all nodes, the odd ones out and the outdated ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from console.pages.requests import is_fragment, vary_on_fragment
from nodes import software_inventory
from nodes.inventory.comparison import Inventory, MixedVersions, SoftwareGroup, VersionFinding, VersionGroup
from nodes.inventory.software import Software
from nodes.models import Agent, Node
from vigil_core import formatting

MAX_FINDINGS = 100
MAX_VERSIONS = 20
"""Versions of one software on the page; kernels and firmware have few, unless somebody makes them up."""
MAX_SOFTWARE = 60
MAX_NAMES = 40
MAX_MIXED, MAX_COUNTS = 20, 4


@dataclass(frozen=True)
class VersionRow:
    """Describes one version and the nodes that have it."""

    group: VersionGroup

    @property
    def names(self) -> list[str]:
        """Return the nodes, odd ones first, as far as they fit the page."""
        return sorted(self.group.nodes, key=lambda name: (name not in self.group.odd, name))[:MAX_NAMES]

    @property
    def more(self) -> int:
        return len(self.group.nodes) - len(self.names)

    @property
    def is_short(self) -> bool:
        """Return whether there are so few nodes that they are named without a click."""
        return len(self.group.nodes) <= 4


@dataclass(frozen=True)
class SoftwareRow:
    """The versions of one software, as far as they fit the page."""

    software: Software
    versions: Sequence[VersionRow]
    more: int

    @classmethod
    def of(cls, group: SoftwareGroup) -> SoftwareRow:
        shown = [VersionRow(version) for version in group.versions[:MAX_VERSIONS]]
        return cls(group.software, shown, len(group.versions) - len(shown))


@dataclass(frozen=True)
class MixedRow:
    """Describes peers without a usual version of a software."""

    mixed: MixedVersions

    @property
    def where(self) -> str:
        """Return the partition and the model of GPU, as far as they are known."""
        return ", ".join(text for text in (self.mixed.partition, self.mixed.model) if text)

    @property
    def text(self) -> str:
        """Return how many nodes have which version."""
        counts = self.mixed.counts
        parts = [
            f"{formatting.plural(number, 'node')} {'has' if number == 1 else 'have'} {version}"
            for version, number in counts[:MAX_COUNTS]
        ]
        if len(counts) > MAX_COUNTS:
            parts.append(formatting.plural(len(counts) - MAX_COUNTS, "more version"))
        return ", ".join(parts)


@login_required
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    found, (minimums, problem) = software_inventory.recent_inventory(), software_inventory.site_minimums()
    context = {
        "section": "cluster",
        "place": "inventory",
        "headline": headline(found),
        "findings": found.findings[:MAX_FINDINGS],
        "more_findings": max(0, len(found.findings) - MAX_FINDINGS),
        "mixed": [MixedRow(mixed) for mixed in found.mixed[:MAX_MIXED]],
        "more_mixed": max(0, len(found.mixed) - MAX_MIXED),
        "rows": [SoftwareRow.of(group) for group in found.groups[:MAX_SOFTWARE]],
        "minimums": minimums.items,
        "problem": problem,
    }
    name = "nodes/_inventory.html" if is_fragment(request) else "nodes/inventory.html"
    return vary_on_fragment(render(request, name, context))


def headline(inventory: Inventory) -> tuple[str, str]:
    """Return the page's lead: nodes below a minimum and odd ones; then how many nodes report."""
    reporting = len(inventory.nodes)
    if not reporting:
        return "No node has reported its software yet.", ""
    with_agent = Agent.objects.filter(node__in=Node.objects.values("name")).exclude(heard_at=None)
    silent = Node.objects.count() - with_agent.count()
    rest = f"{formatting.plural(reporting, 'node')} {'has' if reporting == 1 else 'have'} reported."
    if silent > 0:
        rest += f" {formatting.plural(silent, 'node')} without an agent {'is' if silent == 1 else 'are'} not listed."
    below = _nodes(finding for finding in inventory.findings if finding.minimum)
    odd = _nodes(finding for finding in inventory.findings if finding.usual)
    parts = []
    if below and below == odd:
        have, differ = ("has", "differs") if len(below) == 1 else ("have", "differ")
        lead = f"{_subject(below)} {have} software below a minimum version and {differ} from {_its(odd)} peers."
        return lead, rest
    if below:
        parts.append(f"{_subject(below)} {'has' if len(below) == 1 else 'have'} software below a minimum version")
    if odd:
        parts.append(f"{_subject(odd)} {'differs' if len(odd) == 1 else 'differ'} from {_its(odd)} peers")
    return (f"{', and '.join(parts)}." if parts else _nothing_odd(inventory)), rest


def _nothing_odd(inventory: Inventory) -> str:
    """Return what is true where no version is known to be odd or outdated."""
    if inventory.mixed:
        titles = list(dict.fromkeys(mixed.software.title for mixed in inventory.mixed))
        named = (
            formatting.listed(titles) if len(titles) <= 3 else formatting.plural(len(titles), "kind") + " of software"
        )
        return f"Nodes have different versions of {named}, and none of them is usual."
    if len(inventory.alone) == len(inventory.nodes):
        return "No node has enough peers to compare its versions with."
    if inventory.alone:
        few, have = formatting.plural(len(inventory.alone), "node"), "has" if len(inventory.alone) == 1 else "have"
        return f"Nodes have the versions of their peers; {few} {have} too few peers to compare with."
    return "All nodes have the versions of their peers."


def _nodes(findings: Iterable[VersionFinding]) -> list[str]:
    return sorted({finding.node for finding in findings})


def _subject(names: list[str]) -> str:
    return formatting.listed(names) if len(names) <= 3 else formatting.plural(len(names), "node")


def _its(names: Sequence[str]) -> str:
    return "its" if len(names) == 1 else "their"
