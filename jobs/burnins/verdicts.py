"""Judge the nodes of a burn-in whose tests have ended, and store each verdict with its reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from django.db.models import QuerySet
from django.utils import timezone

from jobs.burnins import golden
from nodes.burnin.evidence import EVENT, BurnInFinding, NodeResults
from nodes.burnin.judge import FAILED, NodeVerdict, judge
from nodes.models import BurnIn, BurnInNode, HealthEntry, Node
from nodes.schedulers.base import JobStatus
from nodes.scheduling import node_states

DOWN = frozenset({"down", "no_respond", "not_responding", "fail", "failing"})
LOST_NODE = "The node failed during the burn-in."


def mark_lost(rows: QuerySet[BurnInNode]) -> None:
    """Store that these nodes failed; their verdicts follow when the tests have ended."""
    rows.update(is_lost=True, outcome=LOST_NODE)


def end_text(status: JobStatus) -> str:
    """Say how a job ended that did not complete."""
    reason = f": {status.reason.rstrip('.')}" if status.reason else ""
    return f"The tests ended early ({status.state.replace('_', ' ')}{reason})."


def verdicts_of(burn_in: BurnIn) -> dict[str, NodeVerdict]:
    """Judge every node; return the verdicts by name."""
    nodes = [results_of(row, burn_in) for row in burn_in.nodes.order_by("node")]
    verdicts = judge(nodes, golden.records_for(nodes))
    return {name: _with_health(burn_in, name, verdict) for name, verdict in verdicts.items()}


def store(burn_in: BurnIn, verdicts: Mapping[str, NodeVerdict]) -> None:
    """Store the verdicts. Call it in the transaction that leaves the state `running`."""
    for name, verdict in verdicts.items():
        findings = [
            {"text": finding.text[:400], "is_warning": finding.is_warning, "kind": finding.kind}
            for finding in verdict.findings[:200]
        ]
        burn_in.nodes.filter(node=name).update(verdict=verdict.verdict, findings=findings, is_lost=verdict.is_node_lost)


def results_of(row: BurnInNode, burn_in: BurnIn) -> NodeResults:
    """Return what the judge needs to know of a node."""
    is_lost = row.is_lost or (not row.has_ended and _failed_since(row.node, burn_in.tests_began_at))
    return NodeResults(
        row.node,
        row.tested_machine,
        [test.summary() for test in row.tests.order_by("id")],
        ended=row.has_ended,
        problem=LOST_NODE if is_lost else burn_in.problem,
        is_node_lost=is_lost,
        expected_gpus=row.gpus,
    )


def _failed_since(name: str, moment: datetime) -> bool:
    """Return whether the node is down, or was and has booted again."""
    node = Node.objects.filter(name=name).first()
    if node is None:
        return False
    has_rebooted = node.booted_at is not None and node.booted_at > moment
    return has_rebooted or not DOWN.isdisjoint(node_states.state_words(node.state))


def _with_health(burn_in: BurnIn, name: str, verdict: NodeVerdict) -> NodeVerdict:
    """Fail a node on which a health rule found something meanwhile that takes it out of service."""
    entries = HealthEntry.objects.out_of_service_between(burn_in.tests_began_at, timezone.now()).filter(node=name)
    texts = sorted({f"{entry.title} during the burn-in (health rule {entry.rule})." for entry in entries[:20]})
    if not texts:
        return verdict
    findings = [*(BurnInFinding(text, kind=EVENT) for text in texts), *verdict.findings]
    return replace(verdict, verdict=FAILED, findings=findings)
