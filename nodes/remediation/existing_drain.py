"""Find the drain for a finding that another finding on the node joins, so that nothing is drained twice."""

from __future__ import annotations

from datetime import datetime

from nodes.cluster import drain, sync
from nodes.cluster.newest_orders import newest_order
from nodes.models import Node, NodeOrder, Reading


def existing_drain(name: str, now: datetime) -> NodeOrder | None:
    """Return the order to drain the node for a finding, if it waits or its reason stands; None if there is none.

    The row of a node that was drained after the last reading has no reason yet.
    """
    read_at = sync.last_read_at(Reading.Part.NODES)  # before the row: a reading meanwhile must not count
    node, newest = Node.objects.filter(name=name).first(), newest_order(name, now)
    if node is None or newest is None or newest.action != NodeOrder.Action.DRAIN:
        return None
    is_done = newest.state == NodeOrder.State.DONE
    is_drained = is_done and (drain.is_reason_of(newest, node) or drain.is_newer_than_rows(newest, read_at))
    return newest if (newest.is_open or is_drained) and newest.is_for_finding else None
