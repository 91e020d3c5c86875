"""Drain and undrain nodes: a sysadmin creates an order, and the next tick carries it out and records the result."""

from __future__ import annotations

import logging
import time
from datetime import datetime, timedelta

from django.db import transaction
from django.db.models import Exists, OuterRef, Q, QuerySet
from django.utils import timezone

from nodes.cluster import sync
from nodes.cluster.service_state import service_state
from nodes.health import limits
from nodes.health.requesters import is_health_rule
from nodes.models import HealthEntry, Node, NodeOrder, Reading
from nodes.schedulers.base import Scheduler, SchedulerError
from nodes.scheduling import node_states
from portal.access import CLUSTER, can, note
from portal.audit import Change
from portal.models import User
from portal.wakes import FOLLOWER
from vigil_core import formatting

logger = logging.getLogger(__name__)

AGAIN = timedelta(seconds=10)  # before a retry, if the scheduler did not respond
GIVE_UP = timedelta(minutes=10)  # an order that has waited so long may no longer be wanted
NOT_REACHED = "Vigil did not get to it within 10 min. Order it again if it is still wanted."
NOT_SENT = "Not sent: "
"""Begins the outcome of an order that the scheduler has never received, though `tried_at` says when that was tried."""
BUDGET_S = 2.0  # per tick
MAX_REASON = 200


_IS_URGENT = Exists(HealthEntry.objects.filter(order=OuterRef("pk"), severity__in=("critical", "fatal")))
"""A node that corrupts results or loses jobs does not wait for a drain of a thousand others."""


class NotOrdered(Exception):
    """Raised if no order was created for a node; the message says why."""


class NodeGone(NotOrdered):
    """Raised if the scheduler has stopped listing the node."""

    def __init__(self, name: str) -> None:
        super().__init__(f"The scheduler does not list {name} any more.")


class NeedsConfirmation(NotOrdered):
    """Raised if the order would end or replace what somebody else decided, and does not say that it may."""


class DrainedByAnother(NeedsConfirmation):
    """Raised if somebody else took the node out of service, for a reason that the order would overwrite or end."""

    def __init__(self, node: Node) -> None:
        state = "drained" if node.is_drained else node_states.closed_reason(node.state)
        by = f"{'' if node.is_drained else ', set'} by {node.reason_by}" if node.reason_by else ""
        since = f" since {formatting.clock(node.reason_at)}" if node.reason_at else ""
        super().__init__(f"{node.name} is {state}{by}{since}: {node.reason.rstrip('.')}.")


class OrderedByPerson(NeedsConfirmation):
    """Raised if the order would replace one of another person that is not carried out yet."""

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
    undrain ends it. `replaces` is the reason that the sysadmin has seen and means to replace. Raises NotOrdered:
    DrainedByAnother if the node has a different reason by somebody else; OrderedByPerson if another person's order
    waits, and this one is Vigil's or without `replaces`; or NodeGone.
    """
    with transaction.atomic():
        # The row lock serialises orders for a node: the second request finds the first one's order.
        locked = Node.objects.select_for_update().filter(pk=node.pk).first()
        if locked is None:
            raise NodeGone(node.name)
        node = locked
        if node.reason != replaces and is_obstacle(node, action, user, rule):
            raise DrainedByAnother(node)
        waiting = NodeOrder.objects.open().filter(node=node.name)
        same = waiting.filter(action=action, reason=reason, asked_by=user, rule=rule).first()
        if same is not None:
            return same
        other = waiting.exclude(asked_by=None).exclude(asked_by=user).select_related("asked_by").first()
        if other is not None and (user is None or replaces is None):
            raise OrderedByPerson(other)
        waiting.update(state=NodeOrder.State.REPLACED, ended_at=timezone.now())
        order = NodeOrder.objects.create(
            node=node.name, action=action, reason=reason, asked_by=user, rule=rule, replaces=node.reason
        )
        before = {"state": node.state, "reason": node.reason}
        note(user, action, node.name, reason, Change(before=before, after={"state": action, "reason": reason}))
        transaction.on_commit(FOLLOWER.request)  # it carries the order out now, not at its next tick
    return order


def is_obstacle(node: Node, action: str, user: User | None, rule: str) -> bool:
    """Return whether the order would overwrite or end what somebody else decided.

    A drain overwrites nobody's decision if the scheduler took the node down by itself.
    """
    if action == NodeOrder.Action.DRAIN and not node.is_drained and node_states.is_down_by_itself(node.reason):
        return False
    return is_drained_by_another(node, user, rule)


def is_drained_by_another(node: Node, user: User | None, rule: str = "") -> bool:
    """Return whether the node is drained or down, and not by the last order of this person or health rule."""
    if not _has_reason(node):
        return False
    last = NodeOrder.objects.filter(node=node.name, state=NodeOrder.State.DONE).select_related("asked_by")
    return is_drained_by_another_given(node, last.first(), user, rule, read_at=sync.last_read_at(Reading.Part.NODES))


def _has_reason(node: Node) -> bool:
    return bool(node.reason) and not node.is_in_service


def is_drained_by_another_given(
    node: Node, last: NodeOrder | None, user: User | None, rule: str = "", *, read_at: datetime | None
) -> bool:
    """Return the same as `is_drained_by_another` without a query.

    It takes the node's last completed order, and the time of the last reading.
    """
    if not _has_reason(node):
        return False
    if last is not None and last.action == NodeOrder.Action.UNDRAIN and is_newer_than_rows(last, read_at):
        return False
    return last is None or (last.asked_by, last.rule) != (user, rule) or not is_reason_of(last, node)


def is_newer_than_rows(order: NodeOrder, read_at: datetime | None) -> bool:
    """Return whether the nodes, read at `read_at`, were not read since the order was carried out: rows are older."""
    return order.ended_at is not None and (read_at is None or read_at < order.ended_at)


def is_reason_of(order: NodeOrder, node: Node) -> bool:
    """Return whether the reason that the scheduler reports for the node is this order's.

    Slurm's adapter splits the requester off the reason; the local scheduler reports the reason as it was given.
    """
    if node.reason == order.reason_with_requester:
        return True
    return (node.reason, node.reason_by) == (order.reason, order.requester)


def carry_out(scheduler: Scheduler) -> None:
    """Carry out open orders that are due within a tick's budget: drains for grave findings first, then the oldest.

    An order that waited too long, as no worker ran or others went first, is refused: what it was for may be over.
    """
    due = []
    for order in _due():
        if timezone.now() - order.asked_at > GIVE_UP:
            _end(order, NodeOrder.State.REFUSED, _given_up(order.outcome) if order.outcome else NOT_REACHED)
        else:
            due.append(order)
    if not due:
        return
    sync.read(scheduler, Reading.Part.NODES)  # somebody may have drained a node with scontrol since the last reading
    problem = sync.readings()[Reading.Part.NODES].error
    until = time.monotonic() + BUDGET_S  # without the reading, which takes long on a slow scheduler
    for number, order in enumerate(due):
        if number and time.monotonic() > until:
            return
        if problem and order.asked_by is None:  # unlike a person, Vigil has not seen the node as it is
            _note_unsent(order, SchedulerError(f"The nodes could not be read: {problem}"))
        else:
            _carry_out(order, scheduler)


def note_outage(error: SchedulerError) -> None:
    """Record a failed attempt for the orders that are due: the scheduler has just not answered another request."""
    for order in _due():
        _note_unsent(order, error)


def _due() -> QuerySet[NodeOrder]:
    # Without an outcome although it was tried: the worker died during the call.
    now = timezone.now()
    due = Q(tried_at=None) | Q(outcome="") | Q(tried_at__lt=now - AGAIN) | Q(tried_at__gt=now)  # the clock was set back
    rows = NodeOrder.objects.open().filter(due).annotate(is_urgent=_IS_URGENT)
    return rows.select_related("asked_by").order_by("-is_urgent", "id")[:50]


def _carry_out(order: NodeOrder, scheduler: Scheduler) -> None:
    if not NodeOrder.objects.open().filter(pk=order.pk).exists():
        return  # replaced or cancelled since it was read
    node = Node.objects.filter(name=order.node).first()
    if node is None:
        _end(order, NodeOrder.State.REFUSED, str(NodeGone(order.node)))
        return
    if node.is_stale and order.asked_by is None:
        _note_unsent(order, SchedulerError(f"The scheduler's record of {node.name} could not be read."))
        return
    if _is_done_already(order, node):
        _end(order, NodeOrder.State.DONE, "")
        return
    if _is_for_past_findings(order):
        _end(order, NodeOrder.State.REFUSED, "The finding is over.")
        return
    if (person := order.asked_by) is None and not order.rule:
        _end(order, NodeOrder.State.REFUSED, "The account of the person who ordered it was deleted. Order it again.")
        return
    if person is not None and not can(person, "change", CLUSTER):
        _end(order, NodeOrder.State.REFUSED, f"{person.username} is no longer a sysadmin.")
        return
    is_unconfirmed = node.reason != order.replaces and not _is_set_by_replaced_order(order, node)
    if is_unconfirmed and is_obstacle(node, order.action, order.asked_by, order.rule):
        again = f"{order.action.capitalize()} it again to override that."
        _end(order, NodeOrder.State.REFUSED, f"{DrainedByAnother(node)} {again}")
        return
    if _is_limited(order) and (refusal := limits.partition_refusal(service_state(counts_waiting=False), order.node)):
        _end(order, NodeOrder.State.REFUSED, refusal)  # others went out of service since it was ordered
        return
    # Before the call: whoever withdraws the order while it is under way must not take it for one never sent.
    if not NodeOrder.objects.open().filter(pk=order.pk).update(tried_at=timezone.now(), outcome=""):
        return
    try:
        if order.action == NodeOrder.Action.DRAIN:
            scheduler.drain(order.node, order.reason_with_requester)
        else:
            scheduler.undrain(order.node)
    except SchedulerError as error:
        _note_failure(order, error)
        return
    sync.hurry(Reading.Part.NODES)
    if not _end(order, NodeOrder.State.DONE, ""):
        _note_carried_out_anyway(order, node)


def _is_for_past_findings(order: NodeOrder) -> bool:
    """Return whether it is a drain for findings none of which is open any more."""
    if order.action != NodeOrder.Action.DRAIN:
        return False
    states = set(order.health_entries.values_list("state", flat=True))
    return bool(states) and HealthEntry.EntryState.OPEN not in states


def _is_limited(order: NodeOrder) -> bool:
    """Return whether it is a drain that a health rule ordered."""
    return order.action == NodeOrder.Action.DRAIN and bool(order.rule) and is_health_rule(order.rule)


def _is_set_by_replaced_order(order: NodeOrder, node: Node) -> bool:
    """Return whether the node's reason is that of an order that was carried out just as this one replaced it."""
    earlier = NodeOrder.objects.filter(node=order.node, pk__lt=order.pk).select_related("asked_by").first()
    if earlier is None or earlier.ended_at is None or earlier.state != NodeOrder.State.DONE:
        return False
    return earlier.ended_at >= order.asked_at and is_reason_of(earlier, node)


def _note_carried_out_anyway(order: NodeOrder, node: Node) -> None:
    """Record that the scheduler carried out an order that was replaced or cancelled meanwhile.

    One that replaced it follows. A drain that was cancelled because nothing needs it any more is undone.
    """
    with transaction.atomic():
        rows = NodeOrder.objects.filter(pk=order.pk)
        is_cancelled = rows.filter(state=NodeOrder.State.REFUSED).exists()
        rows.update(state=NodeOrder.State.DONE, outcome="", ended_at=timezone.now())
        logger.warning("node %s: %s was carried out, though it was no longer wanted", order.node, order.action)
        if not is_cancelled or order.action != NodeOrder.Action.DRAIN or not (order.rule or order.is_for_finding):
            return
        if not NodeOrder.objects.open().filter(node=order.node).exists():
            try:
                request_order(order.asked_by, node, NodeOrder.Action.UNDRAIN, rule=order.rule)
            except NotOrdered as error:
                logger.warning("%s is not undrained: %s", order.node, error)


def _is_done_already(order: NodeOrder, node: Node) -> bool:
    """Return whether a worker carried the order out, and was killed before it recorded that."""
    if order.action == NodeOrder.Action.DRAIN:
        return not node.is_in_service and is_reason_of(order, node)  # Slurm's DOWN+DRAIN is reported as down
    return bool(order.replaces) and node.is_in_service and not node.reason


def _note_failure(order: NodeOrder, error: SchedulerError, prefix: str = "") -> None:
    if error.permanent:
        _end(order, NodeOrder.State.REFUSED, str(error))
    elif timezone.now() - order.asked_at > GIVE_UP:
        _end(order, NodeOrder.State.REFUSED, _given_up(str(error)))
    else:
        NodeOrder.objects.open().filter(pk=order.pk).update(tried_at=timezone.now(), outcome=f"{prefix}{error}")


def _note_unsent(order: NodeOrder, error: SchedulerError) -> None:
    """Record why an order was not sent this time, and whether it never was."""
    is_unsent = order.tried_at is None or order.outcome.startswith(NOT_SENT)
    _note_failure(order, error, NOT_SENT if is_unsent else "")


def _given_up(answer: str) -> str:
    answer = answer.removeprefix(NOT_SENT)
    return f"Given up after {GIVE_UP.total_seconds() / 60:.0f} min. The scheduler's last answer: {answer}"


def _end(order: NodeOrder, state: NodeOrder.State, outcome: str) -> bool:
    """Record how the order ended; return False if it was not open any more."""
    now = timezone.now()
    rows = NodeOrder.objects.open().filter(pk=order.pk)
    if not rows.update(state=state, outcome=outcome, tried_at=now, ended_at=now):
        return False
    logger.info("node %s: %s %s %s", order.node, order.action, state, outcome)
    return True
