"""Undrain nodes that were drained for a finding, once everything that speaks against them is over.

That is what Vigil drained by itself, and what a person approved. It undrains only while that order's reason stands: a
person who drained the node for a reason of their own, or changed the reason, keeps it. A rule that needs a burn-in
stays open until one passed or a person cleared it. A node in maintenance returns when that is over.
"""

from __future__ import annotations

import logging
import time
from datetime import datetime

from django.conf import settings
from django.db import transaction
from django.db.models import Exists, OuterRef, Q
from django.utils import timezone

from nodes.cluster import drain
from nodes.cluster.newest_orders import newest_order, newest_orders
from nodes.health.requesters import SPARE, SPARE_REASON
from nodes.health.rules.rule import OUT_OF_SERVICE
from nodes.models import HealthControl, HealthEntry, HotSpare, MaintenanceWindow, Node, NodeOrder
from nodes.scheduling import node_states
from portal import bulk

logger = logging.getLogger(__name__)

BUDGET_S = 2.0
"""Per pass: it runs on the worker that carries out orders, which wait meanwhile."""


def return_recovered() -> None:
    """Order to undrain the nodes that were drained for a finding and are sound again; safe to run twice at once."""
    if settings.VIGIL_HEALTH != "act":
        return
    now = timezone.now()
    in_maintenance = MaintenanceWindow.ends_by_node(now)
    until = time.monotonic() + BUDGET_S
    for number, name in enumerate(name for name in _drained_for_findings(now) if name not in in_maintenance):
        began = time.monotonic()
        if number and began > until:
            return
        with transaction.atomic():
            if HealthControl.locked().tripped_at is not None:
                return
            _return(name, now)
        bulk.give_way(began)


def _drained_for_findings(now: datetime) -> list[str]:
    """Return the nodes whose last order done was a drain for a finding, and whose current reason is that order's.

    Nodes that `_return` would leave as they are, under the lock that all actions share, are left out: those with an
    open finding, a job or a later order, and those whose finding was dismissed or deleted.
    """
    broken = HealthEntry.objects.open().filter(action__in=OUT_OF_SERVICE).values("node")
    out = Node.objects.reported().exclude(reason="").exclude(name__in=broken)
    nodes = {node.name: node for node in out if not _may_not_return_yet(node)}
    entries = HealthEntry.objects.filter(order=OuterRef("pk"))
    dismissed = entries.in_state(HealthEntry.EntryState.DISMISSED).filter(action__in=OUT_OF_SERVICE)
    is_refused = ~Q(rule="") & Q(state=NodeOrder.State.REFUSED, ended_at__gte=now - drain.GIVE_UP)
    later = NodeOrder.objects.filter(
        Q(state=NodeOrder.State.ASKED) | is_refused, node=OuterRef("node"), pk__gt=OuterRef("pk")
    )
    orders = newest_orders(out, state=NodeOrder.State.DONE).for_findings().filter(action=NodeOrder.Action.DRAIN)
    orders = orders.filter(Exists(entries), ~Exists(dismissed), ~Exists(later)).select_related("asked_by")
    return sorted(o.node for o in orders if o.node in nodes and drain.is_reason_of(o, nodes[o.node]))


def _may_not_return_yet(node: Node) -> bool:
    """Return whether jobs still run there, or the scheduler does not reach it: draining, completing or down."""
    return node.has_jobs or not node_states.is_drained_without_jobs(node.state)


def _return(name: str, now: datetime) -> None:
    node, newest = Node.objects.filter(name=name).first(), newest_order(name, now - drain.GIVE_UP)
    if node is None or newest is None or newest.action != NodeOrder.Action.DRAIN or not newest.is_for_finding:
        return  # a person's order came since
    if _may_not_return_yet(node):
        return
    if newest.state != NodeOrder.State.DONE or not drain.is_reason_of(newest, node):
        return
    # What was dismissed after the node was drained for it lasts: nobody repaired the node.
    lasts = Q(state=HealthEntry.EntryState.OPEN) | Q(state=HealthEntry.EntryState.DISMISSED, order=newest)
    if HealthEntry.objects.active().filter(lasts, node=name, action__in=OUT_OF_SERVICE).exists():
        return
    first = newest.health_entries.order_by("pk").first()
    if first is None:  # it was deleted: a person decides
        return
    try:
        # Of an approved drain, which is in a person's name, that person's reason is replaced.
        request_return(node, newest.rule or first.rule)
    except drain.NotOrdered as error:
        logger.info("%s is not returned to service: %s", name, error)


def request_return(node: Node, rule: str) -> NodeOrder:
    """Order to undrain the node, or to drain it as a hot spare if it stands by: jobs would start there in between.

    The reason that it has now is replaced. Raises NotOrdered.
    """
    action, reason = NodeOrder.Action.UNDRAIN, ""
    if HotSpare.objects.standby().filter(node=node.name).exists():
        action, reason, rule = NodeOrder.Action.DRAIN, SPARE_REASON, SPARE
    return drain.request_order(None, node, action, reason, replaces=node.reason, rule=rule)
