"""Read what an acceptance's burn-in showed: verdicts, pairs, and failures while it ran."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import datetime

from jobs.burnins import health
from jobs.burnins.verdicts import LOST_NODE
from jobs.reliability.comparison import compare
from nodes.acceptance.clauses import ClauseOutcome
from nodes.acceptance.outcomes import (
    ExpectedFailures,
    FailureCount,
    NodeVerdictRow,
    burn_in_clause,
    distinct_failures,
    failures_clause,
    node_days,
    pairs_clause,
)
from nodes.burnin.evidence import TEST, BurnInFinding, NodeResults
from nodes.burnin.reports import ItemSummary
from nodes.models import BurnIn, BurnInNode, BurnInTest, HealthEntry
from nodes.monitoring.site_rules import rules_in_force
from vigil_core import formatting

REQUIRED_RATE = "Meta RSC-1"
MAX_ENTRIES = 1_000


def outcome_clauses(burn_in: BurnIn, rows: list[BurnInNode]) -> list[ClauseOutcome]:
    """Return the outcomes of the burn-in, of all pairs and of the count of failures."""
    return [
        burn_in_clause([_verdict(row) for row in rows], burn_in.problem),
        pairs_clause(_pair_results(burn_in, rows)),
        failures_clause(_failures(burn_in, rows)),
    ]


def _verdict(row: BurnInNode) -> NodeVerdictRow:
    findings = [
        BurnInFinding(str(finding["text"]), finding["is_warning"], finding.get("kind", TEST))
        for finding in row.findings
    ]  # fmt: skip
    return NodeVerdictRow(row.node, row.verdict, tuple(findings))


def _pair_results(burn_in: BurnIn, rows: list[BurnInNode]) -> list[NodeResults]:
    """Return what the nodes reported of their pairs. One query: 256 nodes have 65,280 rows."""
    tests: defaultdict[int, list[ItemSummary]] = defaultdict(list)
    for test in BurnInTest.objects.filter(burn_in_node__burn_in=burn_in, test="pair").order_by("pk").iterator():
        tests[test.burn_in_node_id].append(test.summary())
    return [
        NodeResults(
            row.node, row.tested_machine, tests[row.pk], row.has_ended, is_node_lost=row.is_lost,
            expected_gpus=row.gpus,
        )
        for row in rows
    ]  # fmt: skip


def _failures(burn_in: BurnIn, rows: list[BurnInNode]) -> FailureCount:
    """Count findings that take nodes out of service, and nodes that the scheduler lost."""
    gpus = sum(row.gpus for row in rows)
    if burn_in.started_at is None:
        return FailureCount(0.0, gpus, (), ())
    end = burn_in.job_ended_at or burn_in.ended_at or burn_in.started_at
    judged_at = max(end, burn_in.ended_at or end)
    failures = distinct_failures(_findings(burn_in.tests_began_at, judged_at, {row.node for row in rows}))
    counted = {node for node, *_ in failures}
    lost = [row.node for row in rows if row.node not in counted and row.is_lost]
    texts = [f"{node}, {formatting.exact(at)}: {text}" for node, at, text in failures]
    texts += [f"{node}: {LOST_NODE}" for node in lost]
    hours = max(0.0, (end - burn_in.started_at).total_seconds() / 3600)
    expected = tuple(
        ExpectedFailures(row.name, row.source, row.expected, row.p, row.name == REQUIRED_RATE)
        for row in compare(len(texts), node_days(gpus, hours))
    )
    return FailureCount(hours, gpus, tuple(texts), expected)


def _findings(start: datetime, end: datetime, names: set[str]) -> Iterable[tuple[str, datetime, str]]:
    """Yield what takes a node out of service: what opened meanwhile, and what was open and was observed again."""
    entries = HealthEntry.objects.out_of_service_between(start, end).filter(node__in=names)
    for entry in entries.order_by("pk")[:MAX_ENTRIES]:
        if entry.opened_at is not None:
            yield entry.node, entry.opened_at, f"{entry.title} (health rule {entry.rule})."
    for entry in health.observed_again(names, start, rules_in_force(), MAX_ENTRIES):
        at = min(max(entry.last_seen, start), end)
        yield entry.node, at, f"{entry.title} again (health rule {entry.rule})."
