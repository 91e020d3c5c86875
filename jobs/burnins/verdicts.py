"""Judge the nodes of a burn-in whose tests have ended, and store each verdict with its reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime

from django.db.models import Count, Q, QuerySet

from jobs.burnins import golden, health
from nodes.burnin.evidence import EVENT, BurnInFinding, NodeResults
from nodes.burnin.judge import FAILED, INCONCLUSIVE, PASSED, NodeVerdict, judge
from nodes.health.rules.rule import Rule
from nodes.models import BurnIn, BurnInNode, Gpu, Node
from nodes.monitoring.site_rules import rules_in_force
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
    listed = _listed_gpus(burn_in)
    rows = burn_in.nodes.order_by("node")
    nodes = [replace(results_of(row, burn_in), listed_gpus=listed.get(row.node, 0)) for row in rows]
    verdicts, rules = judge(nodes, golden.records_for(nodes)), rules_in_force()
    since = burn_in.tests_began_at
    return {name: _with_health(verdict, health.findings_of(name, since, rules)) for name, verdict in verdicts.items()}


def judge_again(burn_in: BurnIn, row: BurnInNode, rules: Mapping[str, Rule]) -> None:
    """Change the verdict of a node that passed if health rules have found something on it since."""
    if found := health.findings_of(row.node, burn_in.tests_began_at, rules):
        verdict = NodeVerdict(PASSED, [BurnInFinding(**finding) for finding in row.findings])
        store(burn_in, {row.node: _with_health(verdict, found)})
        row.refresh_from_db(fields=["verdict", "findings"])


def _listed_gpus(burn_in: BurnIn) -> dict[str, int]:
    """Return by node how many GPUs its agent lists, or listed when the burn-in was requested."""
    was_there = Q(gone_at=None) | Q(gone_at__gte=burn_in.requested_at)
    gpus = Gpu.objects.filter(was_there, agent__node__in=burn_in.nodes.values("node")).order_by()
    return dict(gpus.values_list("agent__node").annotate(Count("pk")))


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


def _with_health(verdict: NodeVerdict, found: Sequence[BurnInFinding]) -> NodeVerdict:
    """Fail a node that health rules found something on meanwhile; one on which a fault is left to a person has none."""
    if not found:
        return verdict
    failures = [finding for finding in found if finding.kind == EVENT]
    others = [finding for finding in found if finding.kind != EVENT]
    text = FAILED if failures else INCONCLUSIVE if verdict.verdict == PASSED else verdict.verdict
    findings = sorted([*failures, *verdict.findings, *others], key=lambda finding: finding.is_warning)
    return replace(verdict, verdict=text, findings=findings)
