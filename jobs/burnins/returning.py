"""Decide what becomes of each node after its burn-in, and close the burn-in.

    passed         stays in service; what health rules found before, and leave to no person, is cleared
    failed         is drained with the first reason
    otherwise      is drained again if it was drained before

A hot spare that did not fail stands by again: it is drained before the reservation is removed, as jobs would start.
A node that somebody drained meanwhile keeps that reason. An order that the scheduler refused, such as one given up
while it was away, is repeated: until the node is drained, the reservation must keep jobs out.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta

from django.db import transaction
from django.utils import timezone

from jobs.burnins import golden, health, verdicts
from jobs.burnins.verdicts import results_of
from jobs.disk.trash import moved_to_trash
from jobs.errors import Conflict
from jobs.queueing import queue
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
        if not _is_read_since_undrain(row):
            return f"Waits for the scheduler to report {row.node}."
        with transaction.atomic():
            _order(burn_in, row, rule)
    orders = NodeOrder.objects.filter(pk__in=burn_in.nodes.exclude(return_order=None).values("return_order"))
    if waiting := orders.open().first():
        return f"Waits for the scheduler to drain {waiting.node}."
    return _forget_refused(burn_in)


def _forget_refused(burn_in: BurnIn) -> str:
    """Forget refused orders for nodes that are not drained, so that they are repeated; return why one was refused."""
    refused = burn_in.nodes.filter(return_order__state=NodeState.REFUSED).select_related("return_order")
    nodes = {node.name: node for node in Node.objects.filter(name__in=refused.values("node"))}
    rows = [row.pk for row in refused if (node := nodes.get(row.node)) is not None and not node.is_drained]
    first = NodeOrder.objects.filter(pk__in=refused.filter(pk__in=rows).values("return_order")).first()
    before = timezone.now() - ORDER_RETRY_AFTER
    due = BurnInNode.objects.filter(pk__in=rows, return_order__ended_at__lt=before)
    due.update(is_returned=False, return_order=None)
    return f"{first.node} is not drained yet. {first.outcome_text}" if first else ""


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


def _order(burn_in: BurnIn, row: BurnInNode, rule: str) -> None:
    rules = rules_in_force()
    if row.verdict == PASSED:
        verdicts.judge_again(burn_in, row, rules)
    node = Node.objects.filter(name=row.node).first()
    outcome, order = "", None
    if _is_to_stand_by(row):
        reason, rule = SPARE_REASON, SPARE
    else:
        reason = _drain_reason(burn_in, row)
    if row.undrain_order is not None and row.undrain_order.is_open:  # cancelled before it was carried out
        now = timezone.now()
        NodeOrder.objects.open().filter(pk=row.undrain_order.pk).update(state=NodeState.REPLACED, ended_at=now)
    else:
        if row.verdict == PASSED:
            _clear_entries(burn_in, row, rules)
        if reason and node is not None:
            try:
                order = drain.request_order(None, node, NodeOrder.Action.DRAIN, reason, rule=rule)
            except drain.NotOrdered as error:
                outcome = str(error)
    BurnInNode.objects.filter(pk=row.pk).update(is_returned=True, return_order=order, outcome=outcome)


def _is_to_stand_by(row: BurnInNode) -> bool:
    """Return whether the node is a hot spare that passed, or that has no verdict and stood by before."""
    if row.undrain_order is None or not (row.verdict == PASSED or node_states.is_standby(row.earlier_reason)):
        return False
    HealthControl.locked()  # nobody removes the spare meanwhile
    return row.verdict != FAILED and HotSpare.objects.standby().filter(node=row.node).exists()


def _is_read_since_undrain(row: BurnInNode) -> bool:
    """Return whether the node's state is newer than its undrain: an older one would show it as somebody's drain."""
    order = row.undrain_order
    if order is None or order.state != NodeState.DONE or order.ended_at is None:
        return True
    return sync.nodes_read_since(order.ended_at)


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
    if row.return_order is not None and row.return_order.state == NodeState.DONE:
        return "Stands by as a hot spare." if row.return_order.rule == SPARE else "Drained."
    if row.return_order is not None:
        return f"Not drained: {row.return_order.outcome or row.return_order.get_state_display()}"[:300]
    if node is None:
        return "The scheduler no longer knows it."
    if not node.is_drained:
        return "In service."
    return (row.outcome or f"Drained: {node.reason}")[:300]
