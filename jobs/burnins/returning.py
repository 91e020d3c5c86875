"""Decide what becomes of each node after its burn-in, and close the burn-in.

    passed         stays in service; what health rules found before, and leave to no person, is cleared
    failed         is drained with the first reason
    otherwise      is drained again if it was drained before

A hot spare that did not fail stands by again: it is drained before the reservation is removed, as jobs would start.
A node that somebody drained meanwhile keeps that reason. What Vigil drained meanwhile for maintenance or a finding
would return when that is over, so the burn-in's drain replaces it if it must last longer. An order that the scheduler
refused, such as one given up while it was away, is repeated: until the node is drained, the reservation must keep jobs
out.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

from django.db import transaction
from django.utils import timezone

from jobs.burnins import golden, health, verdicts
from jobs.burnins.start import is_drained_by_person
from jobs.burnins.verdicts import results_of
from jobs.disk.trash import moved_to_trash
from jobs.errors import Conflict
from jobs.queueing import queue
from nodes.burnin.evidence import TEST
from nodes.burnin.judge import FAILED, PASSED
from nodes.cluster import drain, sync
from nodes.health.requesters import SPARE, SPARE_REASON
from nodes.health.rules.rule import Rule
from nodes.models import BurnIn, BurnInNode, HealthControl, HealthEntry, HotSpare, Node, NodeOrder
from nodes.monitoring.site_rules import rules_in_force
from nodes.remediation import inbox
from nodes.remediation.reason import NODE
from nodes.scheduling import node_states
from portal import bulk

MAX_CHARACTERS = 150
ORDER_RETRY_AFTER = timedelta(minutes=1)  # after a refusal
NodeState = NodeOrder.State


def order_all(burn_in: BurnIn, rule: str) -> str:
    """Order what follows for each node; return what this waits for, "" once every order has ended."""
    for row in burn_in.nodes.filter(is_returned=False).select_related("undrain_order"):
        _withdraw_undrain(row)
        if not _is_read_since_orders(row):
            return f"Waits for the scheduler to report {row.node}."
        with transaction.atomic():
            _order(burn_in, row, rule)
    ordered = burn_in.nodes.exclude(return_order=None)
    if waiting := NodeOrder.objects.open().filter(node__in=ordered.values("node")).first():
        return f"Waits for the scheduler to {waiting.action} {waiting.node}."
    return _forget_lost(burn_in)


def _forget_lost(burn_in: BurnIn) -> str:
    """Forget orders that left nodes without the burn-in's drain, so that they are repeated; return why one did."""
    ended = (NodeState.REFUSED, NodeState.REPLACED)
    rows = burn_in.nodes.filter(return_order__state__in=ended).select_related("return_order")
    nodes = {node.name: node for node in Node.objects.filter(name__in=rows.values("node"))}
    lost = [row for row in rows if row.node in nodes and _lacks_drain(row, nodes[row.node])]
    before = timezone.now() - ORDER_RETRY_AFTER
    due = BurnInNode.objects.filter(pk__in=[row.pk for row in lost], return_order__ended_at__lt=before)
    due.update(is_returned=False, return_order=None)
    return _lost_text(lost[0], nodes[lost[0].node]) if lost else ""


def _lost_text(row: BurnInNode, node: Node) -> str:
    state = "is drained for another reason" if node.is_drained else "is not drained yet"
    return f"{row.node} {state}. {row.return_order.outcome_text if row.return_order else ''}"


def _lacks_drain(row: BurnInNode, node: Node) -> bool:
    """Return whether the node must be drained all the same, though the order for it was refused or replaced."""
    if node.is_drained:
        return _may_replace_drain(row, node)
    later = NodeOrder.objects.filter(node=node.name, pk__gt=row.return_order_id, rule="", state=NodeState.DONE)
    return not later.exists()  # a person's decision stands


def finish(burn_in: BurnIn) -> None:
    """End the burn-in: note what became of the nodes, add those that passed to the golden records, free its folder."""
    passed = [results_of(row, burn_in) for row in burn_in.nodes.filter(verdict=PASSED).order_by("node")]
    with transaction.atomic():
        rows = BurnIn.objects.filter(pk=burn_in.pk, state=BurnIn.BurnInState.RETURNING)
        if not rows.update(state=BurnIn.BurnInState.ENDED, ended_at=timezone.now(), detail="", tried_at=None):
            return
        golden.add(passed)
        rows_of_nodes = list(burn_in.nodes.select_related("return_order").order_by("node"))
        nodes = {node.name: node for node in Node.objects.filter(name__in=[row.node for row in rows_of_nodes])}
        for row in rows_of_nodes:
            row.is_active, row.outcome = False, _outcome(row, nodes.get(row.node))
        bulk.update_rows(rows_of_nodes, ("is_active", "outcome"))
    with suppress(Conflict, OSError), moved_to_trash(burn_in.directory):
        queue("jobs.tasks.empty_trash")


def _withdraw_undrain(row: BurnInNode) -> None:
    """Withdraw the undrain of a burn-in that ends before that was carried out.

    One that was tried may have reached the scheduler all the same: the next reading of the nodes shows it.
    """
    if row.undrain_order is not None and row.undrain_order.is_open:
        waiting = NodeOrder.objects.open().filter(pk=row.undrain_order.pk)
        waiting.update(state=NodeState.REPLACED, ended_at=timezone.now())
        row.undrain_order.refresh_from_db()


def _order(burn_in: BurnIn, row: BurnInNode, rule: str) -> None:
    rules = rules_in_force()
    if row.verdict == PASSED:
        verdicts.judge_again(burn_in, row, rules)
    outcome, order = "", None
    reason, rule = (SPARE_REASON, SPARE) if _is_to_stand_by(row) else (_drain_reason(burn_in, row), rule)
    if row.verdict == PASSED:
        _clear_entries(burn_in, row, rules)
    # Locked last: whoever decides about findings locks the node after the control row.
    node = Node.objects.select_for_update().filter(name=row.node).first() if reason else None
    if node is not None and not _was_never_undrained(row, node):
        replaces = node.reason if _may_replace_drain(row, node) else None
        try:
            order = drain.request_order(None, node, NodeOrder.Action.DRAIN, reason, replaces=replaces, rule=rule)
        except drain.NotOrdered as error:
            outcome = str(error)
    BurnInNode.objects.filter(pk=row.pk).update(is_returned=True, return_order=order, outcome=outcome)


def _is_to_stand_by(row: BurnInNode) -> bool:
    """Return whether the node is a hot spare that passed, or that has no verdict and stood by before."""
    if row.undrain_order is None or not (row.verdict == PASSED or node_states.is_standby(row.earlier_reason)):
        return False
    HealthControl.locked()  # nobody removes the spare meanwhile
    return row.verdict != FAILED and HotSpare.objects.standby().filter(node=row.node).exists()


def _is_read_since_orders(row: BurnInNode) -> bool:
    """Return whether the node's state is newer than what the scheduler was sent: an older one shows another drain."""
    sent = NodeOrder.objects.filter(node=row.node, tried_at__isnull=False, ended_at__isnull=False).first()
    return sent is None or sync.nodes_read_since(sent.ended_at)


def _was_never_undrained(row: BurnInNode, node: Node) -> bool:
    """Return whether the burn-in ended before it undrained the node."""
    order = row.undrain_order
    if order is None or order.state == NodeState.DONE:
        return False
    return order.tried_at is None or (node.is_drained and node.reason == row.earlier_reason)


def _may_replace_drain(row: BurnInNode, node: Node) -> bool:
    """Return whether the burn-in's drain replaces the one that stands and would end by itself.

    A person's drain stands. So does a health rule's, unless the tests failed or the node was lost, or a person had
    drained it before: the end of the rule's finding says nothing about that.
    """
    if not node.is_drained or is_drained_by_person(node):
        return False
    last = NodeOrder.objects.filter(node=node.name, state=NodeState.DONE).first()
    if last is None or not last.is_for_finding:
        return True
    has_fault = any(finding.get("kind", TEST) == TEST and not finding["is_warning"] for finding in row.findings)
    return row.was_drained_by_person or (row.verdict == FAILED and (has_fault or row.is_lost))


def _drain_reason(burn_in: BurnIn, row: BurnInNode) -> str:
    """Return the reason to drain the node with; "" if it stays as it is."""
    if row.verdict == FAILED:
        first = row.findings[0]["text"] if row.findings else "failed"
        return f"{NODE} {first}".rstrip(".")[:MAX_CHARACTERS]
    if row.verdict != PASSED and row.undrain_order is not None:
        return f"{NODE} no result of burn-in {burn_in.pk}; before: {row.earlier_reason}"[:MAX_CHARACTERS]
    return ""


def _clear_entries(burn_in: BurnIn, row: BurnInNode, rules: Mapping[str, Rule]) -> None:
    """Clear what a passed burn-in clears, unless something was observed since it began."""
    since = burn_in.tests_began_at
    for entry in HealthEntry.objects.active().filter(node=row.node, first_seen__lt=since):
        if health.is_ended_by_burn_in(entry, rules) and not health.is_observed_since(entry, since, rules):
            inbox.clear(None, entry.pk, f"Burn-in {burn_in.pk} passed.")


def _outcome(row: BurnInNode, node: Node | None) -> str:
    order = row.return_order
    if order is not None and order.state == NodeState.DONE:
        return "Stands by as a hot spare." if order.rule == SPARE else "Drained."
    if node is None:
        return "The scheduler no longer knows it."
    if not node.is_drained:
        return f"Not drained: {order.outcome or order.get_state_display()}"[:300] if order else "In service."
    return (row.outcome or f"Drained: {node.reason}")[:300]
