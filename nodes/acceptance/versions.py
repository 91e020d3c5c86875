"""Judge the minimum versions of an acceptance, with the advisories that the inventory names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from nodes.acceptance.clauses import FAILED, NOT_CHECKED, PASSED, ClauseOutcome
from nodes.inventory.comparison import node_findings
from nodes.inventory.minimums import MinimumVersion, MinimumVersions
from nodes.inventory.software import NodeSoftware
from vigil_core import formatting

MAX_NAMES = 5
OF_GPUS = frozenset({"driver", "cuda", "vbios"})
"""Software that every node with GPUs must report."""


def versions_clause(nodes: Sequence[NodeSoftware], expected: int, minimums: MinimumVersions) -> ClauseOutcome:
    """Compare what is installed with the minimum versions in force. `expected`: how many nodes there are."""
    reported = [node for node in nodes if node.versions]
    if not reported:
        return ClauseOutcome("versions", NOT_CHECKED, "No agent reports versions.")
    below: defaultdict[tuple[str, str, MinimumVersion], list[str]] = defaultdict(list)
    for node in reported:
        for finding in node_findings(node, {}, minimums):
            if finding.minimum is not None:
                below[finding.software.title, finding.version, finding.minimum].append(node.node)
    details = tuple(
        f"{title} {version} on {formatting.listed(names, MAX_NAMES)}: at least {minimum.version}. {minimum.why}"
        f" ({minimum.source})"
        for (title, version, minimum), names in below.items()
    )
    kinds = {software for node in reported for software in node.versions}
    software = {title for title, _, _ in below}
    measured = f"{len(software)} of {formatting.plural(len(kinds), 'kind')} of software below a minimum."
    if details:
        return ClauseOutcome("versions", FAILED, measured, details)
    if len(reported) < expected:
        return ClauseOutcome("versions", NOT_CHECKED, f"Reported by {len(reported)} of {expected} nodes.")
    if unreported := tuple(_unreported(reported, minimums)):
        return ClauseOutcome("versions", NOT_CHECKED, measured, unreported)
    return ClauseOutcome("versions", PASSED, measured)


def _unreported(nodes: Sequence[NodeSoftware], minimums: MinimumVersions) -> Iterable[str]:
    """Yield which nodes do not report software that has a minimum: it may be below that.

    Every node with GPUs has a driver and a VBIOS. Other software may not be installed, unless another node reports it.
    """
    names = {node.node: {software.name for software in node.versions} for node in nodes}
    on_some = set().union(*names.values())
    missing: defaultdict[str, list[str]] = defaultdict(list)
    for minimum in minimums.items:
        for node in nodes:
            is_expected = _concerns(minimum, node.model) if minimum.software in OF_GPUS else minimum.software in on_some
            if is_expected and minimum.software not in names[node.node] and node.node not in missing[minimum.title]:
                missing[minimum.title].append(node.node)
    for title, found in missing.items():
        if found:
            yield f"{title}: not reported by {formatting.listed(found, MAX_NAMES)}."


def _concerns(minimum: MinimumVersion, model: str) -> bool:
    """Return whether the minimum is about software of a node with GPUs of this model, "" without any."""
    return bool(model) and (not minimum.models or any(name.casefold() in model.casefold() for name in minimum.models))
