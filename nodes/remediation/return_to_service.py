"""Undrain nodes that health rules drained, once everything that speaks against them is over.

Vigil undrains only what its own order drained, and only while that order's reason stands: a person who drained the node
as well, or changed the reason, keeps it. A rule that needs a burn-in stays open until one passed or a person cleared
it. A node in maintenance returns when that is over.
"""

from __future__ import annotations

import logging
from datetime import datetime

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from nodes.cluster import drain
from nodes.cluster.newest_orders import newest_order, newest_orders
from nodes.health.rules.rule import OUT_OF_SERVICE
from nodes.models import HealthControl, HealthEntry, MaintenanceWindow, Node, NodeOrder
from nodes.scheduling import node_states

logger = logging.getLogger(__name__)


def return_recovered() -> None:
    """Order to undrain every node that a rule drained and that nothing speaks against; safe to run twice at once."""
    if settings.VIGIL_HEALTH != "act":
        return
    now = timezone.now()
    in_maintenance = MaintenanceWindow.ends_by_node(now)
    for name in _drained_by_rules():
        if name in in_maintenance:
            continue
        with transaction.atomic():
            if HealthControl.locked().tripped_at is not None:
                return
            _return(name, now)


def _drained_by_rules() -> list[str]:
    """Return the nodes that a rule's drain was the last order done for, and whose current reason is that order's."""
    out = Node.objects.reported().exclude(reason="")
    nodes = {node.name: node for node in out}
    orders = newest_orders(out, state=NodeOrder.State.DONE).by_health_rules().filter(action=NodeOrder.Action.DRAIN)
    return sorted(o.node for o in orders if o.node in nodes and drain.is_reason_of(o, nodes[o.node]))


def _return(name: str, now: datetime) -> None:
    node, newest = Node.objects.filter(name=name).first(), newest_order(name, now - drain.GIVE_UP)
    if node is None or newest is None or not newest.rule or newest.action != NodeOrder.Action.DRAIN:
        return  # a person's order came since
    if node.has_jobs or not node_states.is_drained_without_jobs(node.state):
        return  # draining, completing or down: it returns once nothing runs there and the scheduler reaches it
    if newest.state != NodeOrder.State.DONE or not drain.is_reason_of(newest, node):
        return
    if HealthEntry.objects.open().filter(node=name, action__in=OUT_OF_SERVICE).exists():
        return
    if not newest.health_entries.exists():  # its entry was deleted: a person decides
        return
    try:
        drain.request_order(None, node, NodeOrder.Action.UNDRAIN, rule=newest.rule)
    except drain.NotOrdered as error:
        logger.info("%s is not returned to service: %s", name, error)
