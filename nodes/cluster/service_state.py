"""Count the nodes that are out of service, or soon will be, for the limit on automatic drains of a partition.

A standby spare is neither a node that serves nor one that is missing: drained as planned, it must not use up what may
fail, nor, as one of the partition's nodes, raise it. Nor does a node that is only named in slurm.conf. The nodes name
their partitions: a limit holds even where those could not be read.
"""

from __future__ import annotations

from collections import defaultdict

from nodes.cluster import sync
from nodes.cluster.newest_orders import newest_orders
from nodes.health import limits
from nodes.models import HotSpare, Node, NodeOrder, Reading
from nodes.scheduling import node_states


def service_state(*, counts_waiting: bool = True) -> limits.ServiceState:
    """Return the nodes by partition, and those out of service; `counts_waiting`: and those that wait for their drain.

    What was drained after the last reading is out, though the node's row still says otherwise.
    """
    read_at = sync.last_read_at(Reading.Part.NODES)  # before the rows: a reading meanwhile must not count
    spares = set(HotSpare.objects.standby().values_list("node", flat=True))
    everything = Node.objects.reported().only("name", "state", "partitions")
    nodes = [node for node in everything if node.name not in spares and node_states.is_set_up(node.state)]
    partitions: defaultdict[str, set[str]] = defaultdict(set)
    for node in nodes:
        for name in node.partitions:
            partitions[name].add(node.name)
    out = {node.name for node in nodes if not node_states.is_in_service(node.state)}
    drains = NodeOrder.objects.filter(action=NodeOrder.Action.DRAIN)
    if counts_waiting:  # before those that are done: one that is carried out meanwhile is among either
        out |= set(drains.open().values_list("node", flat=True))
    if read_at is not None:
        done = newest_orders(Node.objects.reported(), state=NodeOrder.State.DONE)
        out |= set(done.filter(action=NodeOrder.Action.DRAIN, ended_at__gt=read_at).values_list("node", flat=True))
    return limits.ServiceState(
        {name: frozenset(names) for name, names in partitions.items()}, frozenset(out), len(nodes)
    )
