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

import msgspec
from django.db.models import BooleanField, Case, ExpressionWrapper, Q, When

from jobs.listing import visibility
from jobs.listing.sight import sees_all, visible_holdings
from jobs.listing.visibility import Held
from nodes.models import Agent, Gpu, Holding, Node, RackPlace
from nodes.models.json_text import json_text
from nodes.models.telemetry import SILENT
from nodes.scheduling import capacity
from nodes.telemetry.newest import UNTOLD, Newest, newest_of
from nodes.telemetry.use import IDLE_AFTER
from portal.models import User

_GPU = ("agent_id", "pk", "uuid", "index", "lost_at", "slowdown_c", "power_cap_watts", "fault")
_HOLDING = ("gpu_id", "pk", "scheduler_id", "user", "name", "is_long")
_BY_INDEX = itemgetter(3)
_NODE = (
    "name", "state", "reason", json_text("partitions"), "cpus", "cpus_used", "gpus", "gpus_used",
    json_text("gpus_allocated"), json_text("gpus_by_type"), json_text("gpus_used_by_type"),
)  # fmt: skip
_names = msgspec.json.Decoder(list[str]).decode
_counts = msgspec.json.Decoder(dict[str, int]).decode
_indices = msgspec.json.Decoder(list[int]).decode


class Holder(msgspec.Struct, gc=False):
    """A job that holds a GPU, as far as one may know whose it is."""

    user: str
    name: str
    is_mine: bool = False


class Device(msgspec.Struct, gc=False):
    """A GPU: where it sits, what it did last, who holds it. Values that nobody tells, or that are hidden, are None.

    There are thousands, each a third of a dataclass's work to make, and none for the garbage collector to look at.
    """

    index: int
    pk: int | None = None
    is_lost: bool = False
    is_broken: bool = False  # it answers, and its counters say that it must not (gpus.health)
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
    gpus: int = 0  # that the scheduler gives out; 0 where it knows of none, whatever the agent sees
    gpus_used: int = 0
    free_by_type: dict[str, int] = field(default_factory=dict)  # where it has several types of GPU
    silent_since: datetime | None = None  # when its agent was last heard, if that is too long ago
    rack: str = ""
    slot: int = 0
    rack_order: int = 0
    devices: list[Device] = field(default_factory=list)
    held: list[Held] = field(default_factory=list)

    @property
    def is_silent(self) -> bool:
        return self.silent_since is not None

    @property
    def gpus_free(self) -> int:
        """Return how many the scheduler could allocate now: the same figure as `nodes.models.Node.gpus_free`."""
        return max(0, self.gpus - self.gpus_used) if self.takes_jobs else 0


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
    nodes = {row[0]: row for row in rows.order_by().values_list(*_NODE)}
    found = {name: _of_scheduler(row) for name, row in nodes.items()}
    told = _told(user, now, names)
    for name in told.agents:
        if told.gpus.get(told.agents[name][0]) and name not in found:
            found[name] = Machine(name, state="unknown")
    held = visibility.held_on(user, found)
    idle_from = (now - IDLE_AFTER).timestamp()
    for name, rack, slot, order in RackPlace.objects.order_by().values_list("node", "rack", "slot", "order"):
        if name in found:
            found[name].rack, found[name].slot, found[name].rack_order = rack, slot, order
    for machine in found.values():
        machine.held = held[machine.name]
        _fill(machine, nodes.get(machine.name), told, idle_from)
    return sorted(found.values(), key=lambda machine: machine.name)


def _of_scheduler(row: tuple[Any, ...]) -> Machine:
    name, state, reason, partitions, cpus, cpus_used, gpus, gpus_used, _, by_type, used_by_type = row
    used = _counts(used_by_type)
    free = {kind: max(0, count - used.get(kind, 0)) for kind, count in _counts(by_type).items()}
    return Machine(
        name, state=state, reason=reason, partitions=_names(partitions), cpus=cpus, cpus_used=cpus_used, gpus=gpus,
        gpus_used=gpus_used, free_by_type=free, takes_jobs=not capacity.closed(state),
        is_in_service=capacity.is_in_service(state),
    )  # fmt: skip


def _told(user: User, now: datetime, names: Iterable[str] | None) -> _Told:
    agents = Agent.objects.all() if names is None else Agent.objects.filter(node__in=list(names))
    silent_since = Case(When(is_made_up=False, heard_at__lt=now - SILENT, then="heard_at"))
    by_node = {row[1]: row for row in agents.order_by().values_list("pk", "node", silent_since, json_text("newest"))}
    there = Gpu.objects.filter(gone_at=None)
    held = Holding.objects.filter(until=None)
    if names is not None:
        there, held = there.filter(agent__in=agents), held.filter(agent__in=agents)
    gpus: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for row in there.order_by().values_list(*_GPU):
        gpus[row[0]].append(row)
    is_long = ExpressionWrapper(Q(since__lte=now - IDLE_AFTER), BooleanField())
    visible = None if sees_all(user) else set(visible_holdings(user).filter(until=None).values_list("pk", flat=True))
    # In order here: that is a third of what a database takes to sort them.
    rows = sorted(held.annotate(is_long=is_long).order_by().values_list(*_HOLDING), key=itemgetter(1))
    holdings = {row[0]: row for row in rows}
    if visible is not None:  # what several jobs share is hidden from whoever may not know of one
        holdings |= {row[0]: row for row in rows if row[1] not in visible}
    return _Told(by_node, gpus, holdings, visible)


def _fill(machine: Machine, node: tuple[Any, ...] | None, told: _Told, idle_from: float) -> None:
    """Its GPUs: as its agent tells of them, else as the scheduler counts them."""
    agent = told.agents.get(machine.name)
    rows = told.gpus.get(agent[0], []) if agent else []
    if agent:
        machine.silent_since = agent[2]
    if not rows:
        machine.devices = [] if node is None else list(_counted(machine, node))
        return
    newest = {} if machine.is_silent or agent is None else newest_of(agent[3])
    holders = {held.scheduler_id: _known(held) for held in machine.held if held.user}
    machine.devices = [
        _device(row, newest.get(row[2], UNTOLD), told, holders, idle_from) for row in sorted(rows, key=_BY_INDEX)
    ]


def _device(row: tuple[Any, ...], newest: Newest, told: _Told, holders: dict[str, Holder], idle_from: float) -> Device:
    _, pk, _, index, lost_at, slowdown_c, cap_watts, fault = row
    held, is_wasted, holder = told.holdings.get(pk), False, None
    if held is not None:
        _, key, scheduler_id, user, name, is_long = held
        if told.visible is not None and key not in told.visible:
            return Device(
                index, pk, is_lost=lost_at is not None, is_broken=bool(fault), is_held=True, is_hidden=True,
                slowdown_c=slowdown_c, cap_watts=cap_watts,
            )  # fmt: skip
        is_wasted = is_long and newest.quiet_since is not None and newest.quiet_since <= idle_from
        holder = holders.get(scheduler_id)
        if holder is None:
            holder = holders[scheduler_id] = Holder(user, name)
    return Device(
        index, pk, is_lost=lost_at is not None, is_broken=bool(fault), is_held=held is not None, is_wasted=is_wasted,
        percent=newest.gpu_percent, memory_mib=newest.memory_mib, temperature_c=newest.temperature_c,
        watts=newest.watts, throttle=newest.throttle, slowdown_c=slowdown_c, cap_watts=cap_watts, holder=holder,
    )  # fmt: skip


def _counted(machine: Machine, node: tuple[Any, ...]) -> Iterable[Device]:
    """GPUs of a node whose agent tells none: some schedulers say which are taken, others how many."""
    *_, gpus, used, text, _, _ = node
    allocated = _indices(text)
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
