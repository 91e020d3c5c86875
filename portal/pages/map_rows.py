"""What the map of the cluster is drawn from: nodes, their GPUs' newest values, who holds them, as one may see it.

A few queries whatever the cluster's size; rows are tuples, for a thousand nodes have eight thousand GPUs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from operator import itemgetter
from typing import Any

from django.db.models import BooleanField, ExpressionWrapper, Q

from jobs.listing import visibility
from jobs.listing.sight import sees_all, visible_holdings
from jobs.listing.visibility import Held
from nodes.models import Agent, Gpu, Holding, Node, RackPlace
from nodes.models.telemetry import SILENT
from nodes.scheduling import capacity
from nodes.telemetry.use import IDLE_AFTER
from portal.models import User

_AGENT = ("pk", "node", "heard_at", "newest", "is_made_up")
_GPU = ("agent_id", "pk", "uuid", "index", "lost_at", "slowdown_c", "power_cap_watts")
_HOLDING = ("gpu_id", "pk", "scheduler_id", "user", "name", "is_long")
_BY_INDEX = itemgetter(3)
_NODE = ("name", "state", "reason", "partitions", "cpus", "cpus_used", "gpus", "gpus_used", "gpus_allocated")


@dataclass(slots=True)
class Holder:
    """A job that holds a GPU, as far as one may know whose it is."""

    user: str
    name: str
    is_mine: bool = False


@dataclass(slots=True)
class Device:
    """A GPU: where it sits, what it did last, who holds it. Values that nobody tells, or that are hidden, are None.

    Not frozen, for there are thousands, and each would take twice as long to make.
    """

    index: int
    pk: int | None = None
    is_lost: bool = False
    is_held: bool = False
    is_hidden: bool = False
    is_wasted: bool = False  # held, and has done nothing for a while
    percent: int | None = None
    memory_mib: int | None = None
    temperature_c: int | None = None
    watts: int | None = None
    throttle: int = 0
    slowdown_c: int | None = None
    cap_watts: int | None = None
    holder: Holder | None = None


@dataclass(slots=True)
class Machine:
    """A node of the scheduler's, or a machine that only its agent tells of."""

    name: str
    state: str = ""
    reason: str = ""
    partitions: list[str] = field(default_factory=list)
    is_in_service: bool = True
    takes_jobs: bool = True
    cpus: int = 0
    cpus_used: int = 0
    heard_at: datetime | None = None
    has_agent: bool = False
    is_silent: bool = False
    rack: str = ""
    slot: int = 0
    rack_order: int = 0
    devices: list[Device] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)


@dataclass
class _Told:
    """Agents by node, and GPUs and who holds them by agent."""

    agents: dict[str, tuple[Any, ...]]
    gpus: dict[int, list[tuple[Any, ...]]]
    holdings: dict[int, tuple[Any, ...]]
    visible: set[int] | None  # keys of holdings; None: all


def machines(user: User, now: datetime, *, names: Iterable[str] | None = None) -> list[Machine]:
    """Every node, or those of these names, as this person may see it, by name."""
    rows = Node.objects.all() if names is None else Node.objects.filter(name__in=list(names))
    nodes = {row[0]: row for row in rows.values_list(*_NODE)}
    found = {name: _of_scheduler(row) for name, row in nodes.items()}
    told = _told(user, now, names)
    for name in told.agents:
        if told.gpus.get(told.agents[name][0]) and name not in found:
            found[name] = Machine(name, state="unknown")
    held = visibility.held_on(user, found)
    for name, rack, slot, order in RackPlace.objects.values_list("node", "rack", "slot", "order"):
        if name in found:
            found[name].rack, found[name].slot, found[name].rack_order = rack, slot, order
    for machine in found.values():
        machine.held = held[machine.name]
        _fill(machine, nodes.get(machine.name), told, now)
    return sorted(found.values(), key=lambda machine: machine.name)


def _of_scheduler(row: tuple[Any, ...]) -> Machine:
    name, state, reason, partitions, cpus, cpus_used, *_ = row
    return Machine(
        name, state=state, reason=reason, partitions=partitions, cpus=cpus, cpus_used=cpus_used,
        takes_jobs=not capacity.closed(state), is_in_service=capacity.is_in_service(state),
    )  # fmt: skip


def _told(user: User, now: datetime, names: Iterable[str] | None) -> _Told:
    agents = Agent.objects.all() if names is None else Agent.objects.filter(node__in=list(names))
    by_node = {row[1]: row for row in agents.values_list(*_AGENT)}
    there = Gpu.objects.filter(gone_at=None)
    held = Holding.objects.filter(until=None)
    if names is not None:
        there, held = there.filter(agent__in=agents), held.filter(agent__in=agents)
    gpus: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for row in there.order_by().values_list(*_GPU):
        gpus[row[0]].append(row)
    is_long = ExpressionWrapper(Q(since__lte=now - IDLE_AFTER), BooleanField())
    visible = None if sees_all(user) else set(visible_holdings(user).filter(until=None).values_list("pk", flat=True))
    rows = held.annotate(is_long=is_long).order_by("pk").values_list(*_HOLDING)
    holdings = {row[0]: row for row in rows}
    if visible is not None:  # what several jobs share is hidden from whoever may not know of one
        holdings |= {row[0]: row for row in rows if row[1] not in visible}
    return _Told(by_node, gpus, holdings, visible)


def _fill(machine: Machine, node: tuple[Any, ...] | None, told: _Told, now: datetime) -> None:
    """Its GPUs: as its agent tells of them, else as the scheduler counts them."""
    agent = told.agents.get(machine.name)
    rows = told.gpus.get(agent[0], []) if agent else []
    if agent and agent[2] is not None:
        machine.has_agent, machine.heard_at = True, agent[2]
        machine.is_silent = agent[2] < now - SILENT and not agent[4]
    if not rows:
        machine.devices = [] if node is None else list(_counted(machine, node))
        return
    newest = {} if machine.is_silent or agent is None else agent[3].get("gpus", {})
    holders = {held.scheduler_id: _known(held) for held in machine.held if held.user}
    idle_from = now.timestamp() - IDLE_AFTER.total_seconds()
    machine.devices = [
        _device(row, newest.get(row[2], {}), told, holders, idle_from) for row in sorted(rows, key=_BY_INDEX)
    ]


def _device(
    row: tuple[Any, ...], values: dict[str, Any], told: _Told, holders: dict[str, Holder], idle_from: float
) -> Device:
    _, pk, _, index, lost_at, slowdown_c, cap_watts = row
    held = told.holdings.get(pk)
    device = Device(index, pk, lost_at is not None, held is not None, slowdown_c=slowdown_c, cap_watts=cap_watts)
    if held is not None:
        device.is_hidden = told.visible is not None and held[1] not in told.visible
        if device.is_hidden:
            return device
        device.is_wasted = held[5] and values.get("quiet_since", idle_from + 1) <= idle_from
        device.holder = holders.get(held[2])
        if device.holder is None:
            device.holder = holders[held[2]] = Holder(held[3], held[4])
    device.percent, device.memory_mib = values.get("gpu_percent"), values.get("memory_mib")
    device.temperature_c, device.watts = values.get("temperature_c"), values.get("watts")
    device.throttle = values.get("throttle", 0)
    return device


def _counted(machine: Machine, node: tuple[Any, ...]) -> Iterable[Device]:
    """GPUs of a node whose agent tells none: some schedulers say which are taken, others how many."""
    *_, gpus, used, allocated = node
    holders = {index: held for held in machine.held for index in held.gpus}
    for index in range(min(gpus, 64)):
        held = holders.get(index)
        taken = index in allocated if allocated else index < used
        known = held if held and held.user else None
        is_held = taken or held is not None
        holder = _known(known) if known else None
        yield Device(index, is_held=is_held, is_hidden=is_held and known is None, holder=holder)


def _known(held: Held) -> Holder:
    return Holder(held.user, held.name, held.is_mine)
