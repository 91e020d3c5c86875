"""Draining nodes and taking that back: a sysadmin asks, the next tick carries it out and says what came of it."""

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
from portal.access import note
from portal.models import User

logger = logging.getLogger(__name__)

AGAIN = timedelta(seconds=10)  # after a scheduler that did not answer
GIVE_UP = timedelta(minutes=10)  # nobody wants a node drained by what they asked for an hour ago
BUDGET_S = 2.0  # a tick
MOST_REASON = 200


def ask(user: User, node: Node, action: NodeOrder.Action, reason: str = "") -> NodeOrder:
    """Have it done. Asking again for what is asked for already is one order; anything else replaces that."""
    with transaction.atomic():
        # One at a time for a node: whoever comes second finds the first one's order.
        Node.objects.select_for_update().get(pk=node.pk)
        waiting = NodeOrder.objects.open().filter(node=node.name)
        same = waiting.filter(action=action, reason=reason, asked_by=user).first()
        if same is not None:
            return same
        waiting.update(state=NodeOrder.State.REPLACED, ended_at=timezone.now())
        order = NodeOrder.objects.create(node=node.name, action=action, reason=reason, asked_by=user)
        note(user, action, node.name, reason)
    return order


def carry_out(scheduler: Scheduler) -> None:
    """Whatever is asked for and due; oldest first, within a tick's budget."""
    until = time.monotonic() + BUDGET_S
    for order in _due():
        if time.monotonic() > until:
            return
        _carry_out(order, scheduler)


def put_off(error: SchedulerError) -> None:
    """The scheduler has just not answered something else: they are as if it had been asked."""
    for order in _due():
        _note_failure(order, error)


def _due() -> QuerySet[NodeOrder]:
    due = Q(tried_at=None) | Q(tried_at__lt=timezone.now() - AGAIN)
    return NodeOrder.objects.open().filter(due).select_related("asked_by").order_by("id")[:50]


def _carry_out(order: NodeOrder, scheduler: Scheduler) -> None:
    try:
        if order.action == NodeOrder.Action.DRAIN:
            scheduler.drain(order.node, order.told_reason)
        else:
            scheduler.undrain(order.node)
    except SchedulerError as error:
        _note_failure(order, error)
        return
    _end(order, NodeOrder.State.DONE, "")
    sync.hurry(Reading.Part.NODES)


def _note_failure(order: NodeOrder, error: SchedulerError) -> None:
    if error.permanent:
        _end(order, NodeOrder.State.REFUSED, str(error))
    elif timezone.now() - order.asked_at > GIVE_UP:
        minutes = GIVE_UP.total_seconds() / 60
        _end(order, NodeOrder.State.REFUSED, f"Given up after {minutes:.0f} min. The last answer: {error}")
    else:
        NodeOrder.objects.open().filter(pk=order.pk).update(tried_at=timezone.now(), outcome=str(error))


def _end(order: NodeOrder, state: NodeOrder.State, outcome: str) -> None:
    now = timezone.now()
    rows = NodeOrder.objects.open().filter(pk=order.pk)
    if rows.update(state=state, outcome=outcome, tried_at=now, ended_at=now):
        logger.info("node %s: %s %s %s", order.node, order.action, state, outcome)
