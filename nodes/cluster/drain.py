"""Drain and undrain nodes: a sysadmin creates an order, and the next tick carries it out and records the result."""

from __future__ import annotations

import logging
import time
from datetime import timedelta

from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from nodes.cluster import sync
from nodes.models import Node, NodeOrder, Reading
from nodes.schedulers.base import Scheduler, SchedulerError
from nodes.scheduling import node_states
from portal.access import note
from portal.audit import Change
from portal.models import User
from portal.wakes import FOLLOWER
from vigil_core import formatting

logger = logging.getLogger(__name__)

AGAIN = timedelta(seconds=10)  # before a retry, if the scheduler did not respond
GIVE_UP = timedelta(minutes=10)  # an order that is an hour old may no longer be wanted
BUDGET_S = 2.0  # per tick
MOST_REASON = 200


class DrainedByAnother(Exception):
    """Raised if somebody else took the node out of service, for a reason that the order would overwrite or end."""

    def __init__(self, node: Node) -> None:
        state = "drained" if node.is_drained else node_states.closed_reason(node.state)
        by = f"{'' if node.is_drained else ', set'} by {node.reason_by}" if node.reason_by else ""
        since = f" since {formatting.clock(node.reason_at)}" if node.reason_at else ""
        super().__init__(f"{node.name} is {state}{by}{since}: {node.reason.rstrip('.')}.")


class OrderedByPerson(Exception):
    """Raised if Vigil would replace an order that a person gave and that is not carried out yet."""

    def __init__(self, order: NodeOrder) -> None:
        super().__init__(f"{order.requester} has just ordered to {order.action} {order.node}.")


def request_order(
    user: User | None,
    node: Node,
    action: NodeOrder.Action,
    reason: str = "",
    *,
    replaces: str | None = None,
    rule: str = "",
) -> NodeOrder:
    """Create an order for the node. Repeating an open order returns it; a different one replaces it.

    `user` is None where Vigil follows a health `rule` by itself. In Slurm a drain overwrites another's reason, and an
    undrain ends it. `replaces` is the reason that the sysadmin has seen and means to replace. Raises DrainedByAnother
    if the node has a different one by somebody else.
    """
    with transaction.atomic():
        # The row lock serialises orders for a node: the second request finds the first one's order.
        node = Node.objects.select_for_update().get(pk=node.pk)
        if node.reason != replaces and _is_obstacle(node, action, user, rule):
            raise DrainedByAnother(node)
        waiting = NodeOrder.objects.open().filter(node=node.name)
        same = waiting.filter(action=action, reason=reason, asked_by=user, rule=rule).first()
        if same is not None:
            return same
        if user is None and (other := waiting.exclude(asked_by=None).first()) is not None:
            raise OrderedByPerson(other)
        waiting.update(state=NodeOrder.State.REPLACED, ended_at=timezone.now())
        order = NodeOrder.objects.create(
            node=node.name, action=action, reason=reason, asked_by=user, rule=rule, replaces=node.reason
        )
        before = {"state": node.state, "reason": node.reason}
        note(user, action, node.name, reason, Change(before=before, after={"state": action, "reason": reason}))
        transaction.on_commit(FOLLOWER.request)  # it carries the order out now, not at its next tick
    return order


def _is_obstacle(node: Node, action: str, user: User | None, rule: str) -> bool:
    """Return whether the order would overwrite or end what somebody else decided.

    A drain overwrites nobody's decision if the scheduler took the node down by itself.
    """
    if action == NodeOrder.Action.DRAIN and not node.is_drained and node_states.is_down_by_itself(node.reason):
        return False
    return is_drained_by_another(node, user, rule)


def is_drained_by_another(node: Node, user: User | None, rule: str = "") -> bool:
    """Return whether the node is drained or down, and not by the last order of this person or health rule."""
    last = NodeOrder.objects.filter(node=node.name, state=NodeOrder.State.DONE).select_related("asked_by")
    return _has_reason(node) and is_drain_of_another(node, last.first(), user, rule)


def _has_reason(node: Node) -> bool:
    return bool(node.reason) and not node.is_in_service


def is_drain_of_another(node: Node, last: NodeOrder | None, user: User | None, rule: str = "") -> bool:
    """Return the same for a node of which the last order that was carried out is at hand."""
    if not _has_reason(node):
        return False
    if last is not None and last.action == NodeOrder.Action.UNDRAIN and _is_newer_than_rows(last):
        return False
    return last is None or (last.asked_by, last.rule) != (user, rule) or not is_reason_of(last, node)


def _is_newer_than_rows(order: NodeOrder) -> bool:
    """Return whether the nodes have not been read since the order was carried out: their rows show what was before."""
    read_at = sync.last_read_at(Reading.Part.NODES)
    return order.ended_at is not None and (read_at is None or read_at < order.ended_at)


def is_reason_of(order: NodeOrder, node: Node) -> bool:
    """Return whether the reason that the scheduler reports for the node is this order's.

    Slurm's adapter splits the requester off the reason; the local scheduler reports the reason as it was given.
    """
    if node.reason == order.reason_with_requester:
        return True
    return (node.reason, node.reason_by) == (order.reason, order.requester)


def carry_out(scheduler: Scheduler) -> None:
    """Carry out open orders that are due, oldest first, within a tick's budget.

    An order that waited too long because no worker ran is refused: what it was for may be over.
    """
    until = time.monotonic() + BUDGET_S
    due = []
    for order in _due():
        if timezone.now() - order.asked_at > GIVE_UP:
            minutes = GIVE_UP.total_seconds() / 60
            _end(order, NodeOrder.State.REFUSED, _give_up_text(order, f"No worker ran for {minutes:.0f} min."))
        else:
            due.append(order)
    if due:  # somebody may have drained a node with scontrol since the last reading
        sync.read(scheduler, Reading.Part.NODES)
    for order in due:
        if time.monotonic() > until:
            return
        _carry_out(order, scheduler)


def put_off(error: SchedulerError) -> None:
    """Record a failed attempt for the orders that are due: the scheduler has just not answered another request."""
    for order in _due():
        _note_failure(order, error)


def _due() -> QuerySet[NodeOrder]:
    due = Q(tried_at=None) | Q(tried_at__lt=timezone.now() - AGAIN)
    return NodeOrder.objects.open().filter(due).select_related("asked_by").order_by("id")[:50]


def _carry_out(order: NodeOrder, scheduler: Scheduler) -> None:
    node = Node.objects.filter(name=order.node).first()
    if node and _is_done_already(order, node):
        _end(order, NodeOrder.State.DONE, "")
        return
    is_known = order.asked_by is not None or bool(order.rule)  # a deleted person's order has neither
    is_unconfirmed = node is not None and is_known and node.reason != order.replaces
    if node and is_unconfirmed and _is_obstacle(node, order.action, order.asked_by, order.rule):
        _end(order, NodeOrder.State.REFUSED, f"{DrainedByAnother(node)} Drain it again to replace that.")
        return
    try:
        if order.action == NodeOrder.Action.DRAIN:
            scheduler.drain(order.node, order.reason_with_requester)
        else:
            scheduler.undrain(order.node)
    except SchedulerError as error:
        _note_failure(order, error)
        return
    _end(order, NodeOrder.State.DONE, "")
    sync.hurry(Reading.Part.NODES)


def _is_done_already(order: NodeOrder, node: Node) -> bool:
    """Return whether a worker carried the order out, and was killed before it recorded that."""
    if order.action == NodeOrder.Action.DRAIN:
        return node.is_drained and is_reason_of(order, node)
    return bool(order.replaces) and node.is_in_service and not node.reason


def _note_failure(order: NodeOrder, error: SchedulerError) -> None:
    if error.permanent:
        _end(order, NodeOrder.State.REFUSED, str(error))
    elif timezone.now() - order.asked_at > GIVE_UP:
        _end(order, NodeOrder.State.REFUSED, _give_up_text(order, str(error)))
    else:
        NodeOrder.objects.open().filter(pk=order.pk).update(tried_at=timezone.now(), outcome=str(error))


def _give_up_text(order: NodeOrder, otherwise: str) -> str:
    """Return why an order is given up: the scheduler's last answer, else what kept it from being sent."""
    minutes = GIVE_UP.total_seconds() / 60
    if order.outcome or order.tried_at is not None:
        return f"Given up after {minutes:.0f} min. The scheduler's last answer: {order.outcome or otherwise}"
    return f"{otherwise} Order it again if it is still wanted."


def _end(order: NodeOrder, state: NodeOrder.State, outcome: str) -> None:
    now = timezone.now()
    rows = NodeOrder.objects.open().filter(pk=order.pk)
    if rows.update(state=state, outcome=outcome, tried_at=now, ended_at=now):
        logger.info("node %s: %s %s %s", order.node, order.action, state, outcome)
