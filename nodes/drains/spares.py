"""Keep hot spares drained, and let one take the place of a node that failed.

Whoever names a spare orders its drain, so Vigil keeps it drained even where it only proposes. An exchange is Vigil's
own act: it needs VIGIL_HEALTH=act, an untripped breaker, and is limited as drains are. A spare takes the place of a
node of its partition that a health rule drained or that went down by itself. When that node is in service again, it is
the spare, and the other one stays where its jobs are. A spare that fails while it serves is the spare again, and
another takes the place that it had.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime, timedelta

from django.conf import settings
from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from nodes.cluster import drain, sync
from nodes.drains.reasons import DrainCause, read_reason
from nodes.health import limits
from nodes.health.requesters import SPARE, SPARE_REASON
from nodes.health.rules.rule import OUT_OF_SERVICE
from nodes.models import (
    BurnInNode,
    HealthControl,
    HealthEntry,
    HotSpare,
    MaintenanceWindow,
    Node,
    NodeOrder,
    Partition,
    Reading,
)
from nodes.scheduling import node_states
from portal.access import note
from portal.models import User

logger = logging.getLogger(__name__)

MAX_SPARES = 200
MAX_ORDERS = 20
"""In one transaction; what is left is due at the next one, seconds later."""
HARDWARE = frozenset(
    {
        DrainCause.NOT_RESPONDING, DrainCause.REBOOTED, DrainCause.FEWER_GPUS, DrainCause.LESS_MEMORY, DrainCause.POWER,
    }
)  # fmt: skip
"""What Slurm says of a node that failed, rather than one that somebody took down."""
State = HotSpare.SpareState


class NotSuitable(ValueError):
    """Raised for a node that cannot be a spare; the message says why."""


def add(user: User, node: Node, partition: str) -> HotSpare:
    """Make the node a spare of the partition; Vigil drains it within seconds. Raises NotSuitable."""
    if partition not in node.partitions or not Partition.objects.reported().filter(name=partition).exists():
        raise NotSuitable(f"{node.name} is not in the partition {partition}.")
    with transaction.atomic():
        HealthControl.locked()
        if HotSpare.objects.count() >= MAX_SPARES:
            raise NotSuitable(f"There are {MAX_SPARES} spares already.")
        if HotSpare.objects.filter(node=node.name).exists():
            raise NotSuitable(f"{node.name} is a spare already.")
        spare = HotSpare.objects.create(node=node.name, partition=partition, added_by=user)
        note(user, "spare.added", node.name, partition)
    return spare


def remove(user: User, spare: HotSpare) -> None:
    """Make it an ordinary node again, and undrain it if only that kept it out of service.

    Raises NotSuitable if that would return a node with an open finding to service.
    """
    with transaction.atomic():
        HealthControl.locked()
        # Locks the node before its orders, as orders do.
        node = Node.objects.reported().select_for_update().filter(name=spare.node).first()
        is_unread = node is not None and _is_drain_unread(node)
        is_drained = is_unread or (node is not None and _drained_as_spare(node))
        finding = _open_findings([spare.node]).first()
        if is_drained and finding is not None:
            problem = f"{spare.node} would return to service with an open finding: {finding.title}."
            raise NotSuitable(f"{problem} Approve or clear it first.")
        if not HotSpare.objects.filter(pk=spare.pk).delete()[0]:
            return
        note(user, "spare.removed", spare.node, spare.partition)
        NodeOrder.objects.open().filter(node=spare.node, rule=SPARE).update(
            state=NodeOrder.State.REFUSED, outcome="It is no longer a hot spare.", ended_at=timezone.now()
        )
        if node is not None and is_unread:
            _order(node, NodeOrder.Action.UNDRAIN, "")  # Vigil's order: the row has no reason yet that a person's ends
        elif node is not None and is_drained:
            drain.request_order(user, node, NodeOrder.Action.UNDRAIN, replaces=node.reason)


def advance(now: datetime | None = None) -> None:
    """Drain spares that are in service, exchange one for a node that failed, take back what was repaired."""
    if not HotSpare.objects.exists():
        return
    now = now or timezone.now()
    with transaction.atomic():
        HealthControl.locked()
        nodes, ordered = {node.name: node for node in Node.objects.reported()}, 0
        for spare in _by_node():
            if spare.state == State.SERVING and spare.replaces and _was_not_undrained(spare, nodes.get(spare.node)):
                note(None, "spare.not_in_service", spare.node, f"It did not take the place of {spare.replaces}.")
                _change(spare, State.STANDBY, "", now)
            elif spare.state == State.SERVING and spare.replaces:
                _take_back(spare, nodes, now)
            elif spare.node in nodes and nodes[spare.node].is_in_service and ordered < MAX_ORDERS:
                ordered += _keep_drained(spare, nodes[spare.node], now)
    with transaction.atomic():  # of its own: each locks nodes in the order of their names
        control = HealthControl.locked()
        if settings.VIGIL_HEALTH == "act" and control.tripped_at is None:
            _exchange(_by_node(), nodes, now)


def _by_node() -> list[HotSpare]:
    """Return the spares in the order in which their nodes are locked, which is that of bulk orders."""
    return sorted(HotSpare.objects.all(), key=lambda spare: spare.node)


def _keep_drained(spare: HotSpare, node: Node, now: datetime) -> bool:
    """Drain a spare that is in service, unless a person wants it there; return whether that was ordered."""
    # A person's order that was refused changed nothing.
    newest = NodeOrder.objects.filter(node=node.name).exclude(state=NodeOrder.State.REFUSED, rule="").first()
    read_at = sync.last_read_at(Reading.Part.NODES)
    if newest is not None and (newest.is_open or drain.is_newer_than_rows(newest, read_at)):
        return False
    if _is_tested(node.name):
        return False
    is_ours = newest is not None and newest.rule == SPARE and newest.action == NodeOrder.Action.DRAIN
    is_by_person = newest is not None and newest.asked_by_id is not None and newest.asked_at > spare.since
    if is_by_person or (is_ours and newest is not None and newest.state == NodeOrder.State.DONE):
        _change(spare, State.SERVING, "", now)  # a person undrained it, here or with scontrol: that stands
        note(None, "spare.in_service", spare.node, "A person undrained it.")
    elif not (is_ours and newest is not None and newest.asked_at > now - drain.GIVE_UP):
        return _order(node, NodeOrder.Action.DRAIN, SPARE_REASON)
    return False


def _take_back(spare: HotSpare, nodes: dict[str, Node], now: datetime) -> None:
    """Let the two change places once the node that failed is in service again.

    If the spare is out of service itself by then, it is the spare again, and the other one stays in service.
    """
    repaired, serving = nodes.get(spare.replaces), nodes.get(spare.node)
    if repaired is None or not repaired.is_in_service or repaired.reason or _is_tested(repaired.name):
        return
    if serving is None or not serving.is_in_service:
        note(None, "spare.not_in_service", spare.node, f"{repaired.name} is in service again.")
        _change(spare, State.STANDBY, "", now)
        return
    existing = HotSpare.objects.filter(node=repaired.name)
    if existing.exclude(state=State.SERVING, replaces="").exists():
        return
    existing.delete()  # a person had undrained it, then it failed
    note(None, "spare.changed", repaired.name, f"It is in service again and stands by for {spare.node}.")
    spare.node = repaired.name
    _change(spare, State.STANDBY, "", now)


def _is_tested(name: str) -> bool:
    """Return whether the node may be in service only inside the reservation of a burn-in."""
    return BurnInNode.objects.filter(node=name, is_active=True).exists()


def _was_not_undrained(spare: HotSpare, node: Node | None) -> bool:
    """Return whether the order that was to put the spare into service was refused or given up."""
    newest = NodeOrder.objects.filter(node=spare.node).first()
    if node is None or newest is None or (newest.rule, newest.action) != (SPARE, NodeOrder.Action.UNDRAIN):
        return False
    return newest.state == NodeOrder.State.REFUSED and not node.is_in_service and _drained_as_spare(node)


def _exchange(spares: list[HotSpare], nodes: dict[str, Node], now: datetime) -> None:
    """Put ready spares into service in place of nodes that failed."""
    serving = {spare.node: spare for spare in spares if spare.state == State.SERVING}
    replaced = _replacements(spares, nodes, now)
    for spare in spares:
        name = replaced.get(spare.node, "")
        if name and _order(nodes[spare.node], NodeOrder.Action.UNDRAIN, ""):
            _change(spare, State.SERVING, _give_up_place(serving.get(name), now) or name, now)
            note(None, "spare.in_service", spare.node, f"In place of {name}.")


def _replacements(spares: list[HotSpare], nodes: dict[str, Node], now: datetime) -> dict[str, str]:
    """Return by the names of ready spares which failed node each replaces, within the limit of an hour."""
    # A spare that serves may fail as any other node does; then another takes the place that it had.
    placed = {spare.replaces for spare in spares} | {spare.node for spare in spares if spare.state != State.SERVING}
    in_maintenance = MaintenanceWindow.ends_by_node(now)
    failed = [name for name in sorted(_failed(nodes)) if name not in placed | in_maintenance.keys()]
    ready = [spare for spare in _ready(spares, nodes) if spare.node not in in_maintenance] if failed else []
    remaining = _remaining_exchanges(len(nodes), now) if ready else 0
    found: dict[str, str] = {}
    for name in failed:
        spare = next((spare for spare in ready if spare.partition in nodes[name].partitions), None)
        if spare is not None and len(found) < remaining:
            ready.remove(spare)
            found[spare.node] = name
    return found


def _remaining_exchanges(nodes: int, now: datetime) -> int:
    since = now - timedelta(seconds=limits.HOUR_S)
    recent = NodeOrder.objects.exclude(rule="").filter(asked_at__gt=since)  # as the index has them
    return limits.hourly_limit(nodes) - recent.filter(rule=SPARE, action=NodeOrder.Action.UNDRAIN).count()


def _give_up_place(failed: HotSpare | None, now: datetime) -> str:
    """Make a spare that failed while it served a spare again; return the node whose place it had, "" if none."""
    if failed is None or not failed.replaces:
        return ""
    replaced = failed.replaces
    _change(failed, State.STANDBY, "", now)
    return replaced


def _failed(nodes: dict[str, Node]) -> set[str]:
    """Return the nodes that a health rule drained, or that are down for a reason of their hardware."""
    down = {
        name
        for name, node in nodes.items()
        if "down" in node_states.state_words(node.state) and read_reason(node.reason, node.reason_by).cause in HARDWARE
    }
    entries = HealthEntry.objects.open().filter(
        node__in=list(nodes), action__in=OUT_OF_SERVICE, order__state=NodeOrder.State.DONE,
        order__action=NodeOrder.Action.DRAIN, is_planted=False,
    )  # fmt: skip
    drained = {entry.node for entry in entries.select_related("order") if entry.order and _stands(entry.order, nodes)}
    return down | drained


def _stands(order: NodeOrder, nodes: dict[str, Node]) -> bool:
    return not nodes[order.node].is_in_service and drain.is_reason_of(order, nodes[order.node])


def _ready(spares: list[HotSpare], nodes: dict[str, Node]) -> list[HotSpare]:
    """Return the spares that stand by: drained as spares, and with nothing found on them."""
    names = [spare.node for spare in spares if spare.state == State.STANDBY and _is_only_drained(nodes.get(spare.node))]
    fit = set(names) - set(_open_findings(names).values_list("node", flat=True))
    return [spare for spare in spares if spare.node in fit and _drained_as_spare(nodes[spare.node])]


def _open_findings(names: Sequence[str]) -> QuerySet[HealthEntry]:
    return HealthEntry.objects.open().filter(node__in=names, action__in=OUT_OF_SERVICE)


def _is_only_drained(node: Node | None) -> bool:
    return node is not None and node_states.state_words(node.state) == ["drained"]


def _drained_as_spare(node: Node) -> bool:
    newest = NodeOrder.objects.filter(node=node.name, state=NodeOrder.State.DONE).first()
    return newest is not None and newest.rule == SPARE and drain.is_reason_of(newest, node)


def _is_drain_unread(node: Node) -> bool:
    """Return whether it was drained as a spare after the nodes were last read."""
    newest = NodeOrder.objects.filter(node=node.name, state=NodeOrder.State.DONE).first()
    is_ours = newest is not None and (newest.rule, newest.action) == (SPARE, NodeOrder.Action.DRAIN)
    read_at = sync.last_read_at(Reading.Part.NODES)
    return is_ours and newest is not None and drain.is_newer_than_rows(newest, read_at)


def _order(node: Node, action: NodeOrder.Action, reason: str) -> bool:
    try:
        drain.request_order(None, node, action, reason, rule=SPARE)
    except drain.NotOrdered as error:
        logger.info("the spare %s is left as it is: %s", node.name, error)
        return False
    return True


def _change(spare: HotSpare, state: str, replaces: str, now: datetime) -> None:
    spare.state, spare.replaces, spare.since = state, replaces, now
    spare.save(update_fields=["node", "state", "replaces", "since"])
    logger.info("hot spare %s: %s %s", spare.node, state, replaces)
