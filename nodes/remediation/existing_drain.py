"""Find the drain for a finding that another finding on the node joins, so that nothing is drained twice."""

from __future__ import annotations

from datetime import datetime

from nodes.cluster import drain
from nodes.cluster.newest_orders import newest_order
from nodes.models import Node, NodeOrder


def existing_drain(name: str, now: datetime) -> NodeOrder | None:
    """Return the order to drain the node for a finding, if it waits or its reason stands; None if there is none."""
    node, newest = Node.objects.filter(name=name).first(), newest_order(name, now)
    if node is None or newest is None or newest.action != NodeOrder.Action.DRAIN:
        return None
    stands = newest.is_open or (newest.state == NodeOrder.State.DONE and drain.is_reason_of(newest, node))
    return newest if stands and newest.is_for_finding else None
