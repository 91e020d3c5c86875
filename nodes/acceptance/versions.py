"""Judge the minimum versions of an acceptance, with the advisories that the inventory names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from nodes.acceptance.clauses import FAILED, NOT_TRIED, PASSED, ClauseOutcome
from nodes.inventory.comparison import node_findings
from nodes.inventory.minimums import MinimumVersion, MinimumVersions
from nodes.inventory.software import NodeSoftware
from vigil_core import formatting

MOST_NAMES = 5


def versions_clause(nodes: Sequence[NodeSoftware], expected: int, minimums: MinimumVersions) -> ClauseOutcome:
    """Compare what is installed with the minimum versions in force. `expected`: how many nodes there are."""
    reported = [node for node in nodes if node.versions]
    if not reported:
        return ClauseOutcome("versions", NOT_TRIED, "No agent reports versions.")
    below: defaultdict[tuple[str, str, MinimumVersion], list[str]] = defaultdict(list)
    for node in reported:
        for finding in node_findings(node, {}, minimums):
            if finding.minimum is not None:
                below[finding.software.title, finding.version, finding.minimum].append(node.node)
    details = tuple(
        f"{title} {version} on {formatting.listed(names, MOST_NAMES)}: at least {minimum.version}. {minimum.why}"
        f" ({minimum.source})"
        for (title, version, minimum), names in below.items()
    )
    kinds = {software for node in reported for software in node.versions}
    software = {title for title, _, _ in below}
    measured = f"{len(software)} of {formatting.plural(len(kinds), 'kind')} of software below a minimum."
    if details:
        return ClauseOutcome("versions", FAILED, measured, details)
    if len(reported) < expected:
        return ClauseOutcome("versions", NOT_TRIED, f"Reported by {len(reported)} of {expected} nodes.")
    return ClauseOutcome("versions", PASSED, measured)
