"""Load what the map of the cluster shows: nodes, GPUs' newest values, and who uses them, as one person may see it.

A few queries whatever the cluster's size; rows are tuples, as a thousand nodes have eight thousand GPUs.
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
from jobs.listing.telemetry_access import visible_holdings
from jobs.listing.visibility import NodeAllocation
from nodes.models import Agent, Gpu, Holding, Node, RackPlace
from nodes.models.json_text import json_text
from nodes.models.telemetry import SILENT
from nodes.scheduling import node_states
from nodes.telemetry.newest import NO_VALUES, NewestValues, newest_of
from nodes.telemetry.use import IDLE_AFTER
from portal.access import sees_all
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


class MapHolder(msgspec.Struct, gc=False):
    """A job that a GPU is allocated to, as far as this person may see it."""

    user: str
    name: str
    is_viewer: bool = False


class MapGpu(msgspec.Struct, gc=False):
    """A GPU: its index, newest values and job. Values that are not reported or hidden are None.

    There are thousands: a Struct takes a third of a dataclass's time to create, and the garbage collector skips it.
    """

    index: int
    pk: int | None = None
    is_lost: bool = False
    is_broken: bool = False  # it responds, but its counters show a fault (gpus.health)
    is_allocated: bool = False
    is_hidden: bool = False
    is_wasted: bool = False  # allocated, but idle for a while
    percent: int | None = None
    memory_mib: int | None = None
    temperature_c: int | None = None
    watts: int | None = None
    throttle: int = 0
    slowdown_c: int | None = None
    cap_watts: int | None = None
    holder: MapHolder | None = None


@dataclass(slots=True)
class MapNode:
    """A node of the scheduler, or a machine known only through its agent."""

    name: str
    state: str = ""
    reason: str = ""
    partitions: list[str] = field(default_factory=list)
    is_in_service: bool = True
    takes_jobs: bool = True
    cpus: int = 0
    cpus_used: int = 0
    gpus: int = 0  # that the scheduler allocates; 0 if it knows of none, whatever the agent reports
    gpus_used: int = 0
    free_by_type: dict[str, int] = field(default_factory=dict)  # if it has several types of GPU
    silent_since: datetime | None = None  # when its agent was last heard, if that is too long ago
    rack: str = ""
    slot: int = 0
    rack_order: int = 0
    devices: list[MapGpu] = field(default_factory=list)
    jobs: list[NodeAllocation] = field(default_factory=list)

    @property
    def is_silent(self) -> bool:
        return self.silent_since is not None

    @property
    def gpus_free(self) -> int:
        """Return how many the scheduler could allocate now: the same figure as `nodes.models.Node.gpus_free`."""
        return max(0, self.gpus - self.gpus_used) if self.takes_jobs else 0


@dataclass
class _AgentData:
    """Agents by node, and GPUs and their allocations by agent."""

    agents: dict[str, tuple[Any, ...]]
    gpus: dict[int, list[tuple[Any, ...]]]
    holdings: dict[int, tuple[Any, ...]]
    visible: set[int] | None  # keys of holdings; None: all


def machines(user: User, now: datetime, *, names: Iterable[str] | None = None) -> list[MapNode]:
    """Return all nodes, or those with these names, as this person may see them, by name."""
    rows = Node.objects.all() if names is None else Node.objects.filter(name__in=list(names))
    nodes = {row[0]: row for row in rows.order_by().values_list(*_NODE)}
    found = {name: _of_scheduler(row) for name, row in nodes.items()}
    agent_data = _load_agents(user, now, names)
    for name in agent_data.agents:
        if agent_data.gpus.get(agent_data.agents[name][0]) and name not in found:
            found[name] = MapNode(name, state="unknown")
    jobs = visibility.allocations_on(user, found)
    idle_from = (now - IDLE_AFTER).timestamp()
    for name, rack, slot, order in RackPlace.objects.order_by().values_list("node", "rack", "slot", "order"):
        if name in found:
            found[name].rack, found[name].slot, found[name].rack_order = rack, slot, order
    for machine in found.values():
        machine.jobs = jobs[machine.name]
        _set_gpus(machine, nodes.get(machine.name), agent_data, idle_from)
    return sorted(found.values(), key=lambda machine: machine.name)


def _of_scheduler(row: tuple[Any, ...]) -> MapNode:
    name, state, reason, partitions, cpus, cpus_used, gpus, gpus_used, _, by_type, used_by_type = row
    used = _counts(used_by_type)
    free = {kind: max(0, count - used.get(kind, 0)) for kind, count in _counts(by_type).items()}
    return MapNode(
        name, state=state, reason=reason, partitions=_names(partitions), cpus=cpus, cpus_used=cpus_used, gpus=gpus,
        gpus_used=gpus_used, free_by_type=free, takes_jobs=not node_states.closed_reason(state),
        is_in_service=node_states.is_in_service(state),
    )  # fmt: skip


def _load_agents(user: User, now: datetime, names: Iterable[str] | None) -> _AgentData:
    agents = Agent.objects.all() if names is None else Agent.objects.filter(node__in=list(names))
    silent_since = Case(When(is_made_up=False, heard_at__lt=now - SILENT, then="heard_at"))
    by_node = {row[1]: row for row in agents.order_by().values_list("pk", "node", silent_since, json_text("newest"))}
    present = Gpu.objects.filter(gone_at=None)
    holdings_now = Holding.objects.filter(until=None)
    if names is not None:
        present, holdings_now = present.filter(agent__in=agents), holdings_now.filter(agent__in=agents)
    gpus: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
    for row in present.order_by().values_list(*_GPU):
        gpus[row[0]].append(row)
    is_long = ExpressionWrapper(Q(since__lte=now - IDLE_AFTER), BooleanField())
    visible = None if sees_all(user) else set(visible_holdings(user).filter(until=None).values_list("pk", flat=True))
    # Sorted here: that takes a third of a database's time to sort them.
    rows = sorted(holdings_now.annotate(is_long=is_long).order_by().values_list(*_HOLDING), key=itemgetter(1))
    holdings = {row[0]: row for row in rows}
    if visible is not None:  # GPUs that several jobs share are hidden from people who may not see one of the jobs
        holdings |= {row[0]: row for row in rows if row[1] not in visible}
    return _AgentData(by_node, gpus, holdings, visible)


def _set_gpus(machine: MapNode, node: tuple[Any, ...] | None, agent_data: _AgentData, idle_from: float) -> None:
    """Set the node's GPUs: as its agent reports them, else as the scheduler counts them."""
    agent = agent_data.agents.get(machine.name)
    rows = agent_data.gpus.get(agent[0], []) if agent else []
    if agent:
        machine.silent_since = agent[2]
    if not rows:
        machine.devices = [] if node is None else list(_scheduler_gpus(machine, node))
        return
    newest = {} if machine.is_silent or agent is None else newest_of(agent[3])
    holders = {job.scheduler_id: _to_holder(job) for job in machine.jobs if job.user}
    machine.devices = [
        _device(row, newest.get(row[2], NO_VALUES), agent_data, holders, idle_from)
        for row in sorted(rows, key=_BY_INDEX)
    ]


def _device(
    row: tuple[Any, ...], newest: NewestValues, agent_data: _AgentData, holders: dict[str, MapHolder], idle_from: float
) -> MapGpu:
    _, pk, _, index, lost_at, slowdown_c, cap_watts, fault = row
    holding, is_wasted, holder = agent_data.holdings.get(pk), False, None
    if holding is not None:
        _, key, scheduler_id, user, name, is_long = holding
        if agent_data.visible is not None and key not in agent_data.visible:
            return MapGpu(
                index, pk, is_lost=lost_at is not None, is_broken=bool(fault), is_allocated=True, is_hidden=True,
                slowdown_c=slowdown_c, cap_watts=cap_watts,
            )  # fmt: skip
        is_wasted = is_long and newest.quiet_since is not None and newest.quiet_since <= idle_from
        holder = holders.get(scheduler_id)
        if holder is None:
            holder = holders[scheduler_id] = MapHolder(user, name)
    return MapGpu(
        index, pk, is_lost=lost_at is not None, is_broken=bool(fault), is_allocated=holding is not None,
        is_wasted=is_wasted,
        percent=newest.gpu_percent, memory_mib=newest.memory_mib, temperature_c=newest.temperature_c,
        watts=newest.watts, throttle=newest.throttle, slowdown_c=slowdown_c, cap_watts=cap_watts, holder=holder,
    )  # fmt: skip


def _scheduler_gpus(machine: MapNode, node: tuple[Any, ...]) -> Iterable[MapGpu]:
    """Yield GPUs of a node whose agent reports none: some schedulers say which are allocated, others only how many."""
    *_, gpus, used, text, _, _ = node
    allocated = _indices(text)
    holders = {index: job for job in machine.jobs for index in job.gpus}
    for index in range(min(gpus, 64)):
        job = holders.get(index)
        taken = index in allocated if allocated else index < used
        visible_job = job if job and job.user else None
        is_allocated = taken or job is not None
        holder = _to_holder(visible_job) if visible_job else None
        yield MapGpu(index, is_allocated=is_allocated, is_hidden=is_allocated and visible_job is None, holder=holder)


def _to_holder(job: NodeAllocation) -> MapHolder:
    return MapHolder(job.user, job.name, job.is_mine)
