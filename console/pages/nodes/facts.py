"""Load what the page of one node shows: its GPUs, events and jobs, as one person may see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from django.db.models import Max, Q, Sum

from jobs.listing import gpu_allocations
from jobs.listing.gpu_allocations import AllocationSpan
from jobs.listing.telemetry_access import TelemetryAccess, access_of, earliest_report
from nodes.models import Agent, Gpu, Node, NodeEvent
from nodes.presenting import events, figures, gpu_fields, machine
from nodes.presenting.counters import GpuCounterRow, counter_row, sorted_rows
from nodes.presenting.events import Words
from nodes.telemetry import read
from nodes.telemetry.events import OPENS
from nodes.telemetry.fields import GPU_FIELDS, host_owner
from portal.models import User
from vigil_core import formatting, untrusted
from vigil_core.formatting import NBSP

HOUR_S, DAY_S = 3600, 86_400
RANGES = {"1h": HOUR_S, "6h": 6 * HOUR_S, "24h": DAY_S, "7d": 7 * DAY_S, "30d": 30 * DAY_S, "90d": 90 * DAY_S}
DEFAULT_RANGE = "1h"
MAX_EVENTS, MAX_MARKS, MAX_PROCESSES, MAX_JOBS, MAX_MATRIX = 100, 300, 100, 50, 16


@dataclass(frozen=True)
class TimeSpan:
    """The time range shown, in Unix seconds; `name` is the predefined range, "" for a custom one."""

    start: int
    end: int
    name: str

    @property
    def title(self) -> str:
        """Return the predefined range in words: "hour", "6 h", "30 d"."""
        return "hour" if self.name == DEFAULT_RANGE else f"{self.name[:-1]}{NBSP}{self.name[-1:]}"

    @property
    def moments(self) -> tuple[datetime, datetime]:
        return moment(self.start), moment(self.end)

    @property
    def query(self) -> str:
        return f"from={self.start}&to={self.end}"


def span_of(query: Mapping[str, str], now: datetime) -> TimeSpan:
    """Parse the time range of the URL; fall back to the default one."""
    second = int(now.timestamp()) + 1
    start, end = (untrusted.whole(query.get(name), untrusted.MAX_UNIX_TIME) for name in ("from", "to"))
    if start is not None and end is not None and start < end:
        return TimeSpan(start, end, "")
    name = query.get("range", "")
    name = name if name in RANGES else DEFAULT_RANGE
    return TimeSpan(second - RANGES[name], second, name)


@dataclass(frozen=True)
class NodePageEvent:
    """An event of the node, in words."""

    event: NodeEvent
    words: Words
    is_hidden: bool

    @property
    def lasted_s(self) -> float | None:
        """Return the duration in seconds of an event that lasts; None while it is open."""
        event = self.event
        return (event.last_at - event.at).total_seconds() if event.kind in OPENS and not event.is_open else None


@dataclass(frozen=True)
class GpuProcessRow:
    """A process on a GPU. Its name and user are untrusted text."""

    gpu: int | None
    pid: int
    name: str
    user: str
    memory: str
    allocation: AllocationSpan | None
    scheduler_id: str


@dataclass(frozen=True)
class GpuLane:
    """A GPU with its small charts, newest values and current jobs."""

    gpu: Gpu
    charts: list[dict[str, Any]]
    newest: list[tuple[str, str, dict[str, Any]]]  # title, value, chart
    holders: list[AllocationSpan]
    is_hidden: bool
    is_hot: bool


@dataclass(frozen=True)
class JobVisit:
    """A job that ran on the node, with all GPUs that it used there."""

    allocation: AllocationSpan
    gpus: list[int]
    since: datetime
    until: datetime | None


@dataclass(frozen=True)
class MachineView:
    """Present a node in a time range as a given person may see it."""

    user: User
    node: Node | None
    agent: Agent
    span: TimeSpan
    now: datetime

    @cached_property
    def gpus(self) -> list[Gpu]:
        """Return its present GPUs and those that it had within this range."""
        there = Q(gone_at=None) | Q(gone_at__gt=self.span.moments[0], first_seen_at__lt=self.span.moments[1])
        return list(self.agent.gpus.filter(there).order_by("gone_at", "index"))

    @property
    def present_gpus(self) -> list[Gpu]:
        return [gpu for gpu in self.gpus if gpu.gone_at is None]

    @property
    def is_silent(self) -> bool:
        return not self.agent.is_made_up and self.agent.is_silent(self.now)

    @cached_property
    def access(self) -> TelemetryAccess:
        now = self.now.timestamp()
        start = min(self.span.start, earliest_report(now, [self.agent]))
        return access_of(self.user, [gpu.pk for gpu in self.gpus], start, max(self.span.end, now))

    def hides(self, gpu: Gpu) -> bool:
        """Return whether the GPU's current values are hidden from this person."""
        return self.access.hides_newest(gpu.pk, self.now.timestamp(), self.agent.sampled_at)

    def newest(self, gpu: Gpu) -> dict[str, Any]:
        return {} if self.hides(gpu) else self.agent.newest.get("gpus", {}).get(gpu.uuid, {})

    @property
    def host(self) -> dict[str, float]:
        host: dict[str, float] = self.agent.newest.get("host", {})
        return host

    @cached_property
    def allocations(self) -> list[AllocationSpan]:
        return gpu_allocations.allocation_spans(self.user, self.agent, *self.span.moments)

    @cached_property
    def holders(self) -> dict[int | None, list[AllocationSpan]]:
        """Return the current jobs of each GPU."""
        found: dict[int | None, list[AllocationSpan]] = {}
        for allocation in gpu_allocations.allocation_spans(self.user, self.agent, self.now, self.now):
            found.setdefault(allocation.gpu_id, []).append(allocation)
        return found

    @cached_property
    def events(self) -> list[NodePageEvent]:
        """Return events in this range and open ones, newest first."""
        start, end = self.span.moments
        rows = NodeEvent.objects.filter(agent=self.agent, at__lte=end).filter(Q(last_at__gte=start) | Q(is_open=True))
        found = list(rows.select_related("gpu").order_by("-at", "-id")[:MAX_MARKS])
        first = min((row.at.timestamp() for row in found), default=self.span.start)
        visible = access_of(self.user, {row.gpu_id for row in found if row.gpu_id}, first, max(self.span.end, first))
        return [self._in_words(row, is_hidden=visible.hides_text(row)) for row in found]

    def _in_words(self, row: NodeEvent, *, is_hidden: bool) -> NodePageEvent:
        """Describe an event, hiding the kernel's text if it may name somebody else's processes."""
        text, data = ("", {}) if is_hidden else (row.text, row.data)
        return NodePageEvent(row, events.words(row.kind, row.code, text, data), is_hidden)


def facts_of(shown: MachineView) -> machine.NodeHeadline:
    """Return the facts for the page's lead sentence."""
    node, agent = shown.node, shown.agent
    lasting = NodeEvent.objects.filter(agent=agent, is_open=True).order_by("at")
    by_node: dict[str, Any] = {} if node is None else scheduler_facts(node)
    return machine.NodeHeadline(
        now=shown.now,
        has_agent=True,
        last_report_at=agent.heard_at,
        is_silent=shown.is_silent,
        driver_silent_at=next((row.at for row in lasting if row.kind == "gpu.silent"), None),
        gpus=[gpu_facts(shown, gpu) for gpu in shown.present_gpus],
        xids=driver_errors(agent, shown.now - machine.XID_WINDOW),
        hanging=[(events.mount_of(row.data), row.at) for row in lasting if row.kind == "mount.slow"],
        cpu_percent=shown.host.get("cpu_percent"),
        **by_node,
    )


def driver_errors(agent: Agent, since: datetime) -> list[machine.DriverError]:
    """Return the Xids and SXids since then, one for each code and GPU, so that a flood of one does not hide another."""
    rows = NodeEvent.objects.filter(agent=agent, kind__in=("xid", "sxid"), last_at__gte=since).order_by()
    alike = rows.values_list("code", "gpu__index", "kind", "data__fatal").annotate(last=Max("last_at"), n=Sum("count"))
    return [
        machine.DriverError(code, index, last, many, kind, is_fatal is True)
        for code, index, kind, is_fatal, last, many in alike[:MAX_MARKS]
    ]


def scheduler_facts(node: Node) -> dict[str, Any]:
    """Return the facts for the lead sentence that the scheduler knows."""
    free = (node.gpus_free, node.gpus, "GPU") if node.gpus else (node.cpus_free, node.cpus, "CPU")
    return {
        "state": node.state,
        "takes_jobs": node.takes_jobs,
        "reason": node.reason,
        "reason_by": node.reason_by,
        "reason_at": node.reason_at,
        "free": f"{formatting.count(free[0])} of {formatting.plural(free[1], free[2])}",
    }


def gpu_facts(shown: MachineView, gpu: Gpu) -> machine.GpuState:
    newest = shown.newest(gpu)
    return machine.GpuState(
        index=gpu.index,
        percent=newest.get("gpu_percent"),
        temperature_c=newest.get("temperature_c"),
        slowdown_c=gpu.slowdown_c,
        throttle=newest.get("throttle") or 0,
        lost_at=gpu.lost_at,
        fault=gpu.fault,
        is_hidden=shown.hides(gpu),
    )


def counters(shown: MachineView) -> list[GpuCounterRow]:
    """Return the slow counters of its GPUs, as last reported, what needs attention first."""
    rows = []
    for gpu in shown.present_gpus:
        if gpu.counters and not gpu.lost_at:
            newest = shown.newest(gpu)
            is_busy = (untrusted.number(newest.get("gpu_percent")) or 0) >= 50
            throttle = untrusted.count(newest.get("throttle"))
            rows.append(
                counter_row(
                    gpu.index, gpu.counters, throttle=throttle, is_busy=is_busy, maximum_watts=gpu.power_cap_watts
                )
            )
    return sorted_rows(rows)


def lanes(shown: MachineView) -> list[GpuLane]:
    """Return a row per GPU."""
    return [_lane(shown, gpu) for gpu in shown.gpus]


def _lane(shown: MachineView, gpu: Gpu) -> GpuLane:
    charts = figures.of_gpu(
        gpu.uuid, gpu.index, key=str(gpu.pk), memory_mib=gpu.memory_mib, slowdown_c=gpu.slowdown_c,
        cap_watts=gpu.power_cap_watts,
    )  # fmt: skip
    values = shown.newest(gpu) if gpu.gone_at is None else {}
    newest = [
        (field.title, field.number(values.get(field.name)), chart)
        for field, chart in zip(gpu_fields.FIELDS, charts, strict=True)
    ]
    hot = gpu_facts(shown, gpu).is_hot and not shown.hides(gpu)
    return GpuLane(gpu, charts, newest, shown.holders.get(gpu.pk, []), shown.hides(gpu), hot)


def host_figures(shown: MachineView) -> list[dict[str, Any]]:
    """Return the charts of the host itself."""
    names = read.names(host_owner(shown.agent.pk), [*shown.host])
    cpus = untrusted.count(shown.agent.facts.get("cpus"))
    memory = shown.host.get("memory_total_mib") or untrusted.count(shown.agent.facts.get("memory_mib"))
    drawn = figures.of_host([name for name in names if name not in GPU_FIELDS], cpus=cpus, memory_mib=memory)
    for line in (line for figure in drawn for line in figure["series"]):
        value = shown.host.get(line["name"])
        line["newest"] = formatting.measure(None if value is None else value * line["factor"])
    return drawn


def marks(shown: MachineView) -> dict[str, Any]:
    """Return what charts show besides curves: which job used each GPU, and events."""
    uuids = {gpu.pk: gpu.uuid for gpu in shown.gpus}
    bands: dict[str, list[list[Any]]] = {uuid: [] for uuid in uuids.values()}
    for allocation in reversed(shown.allocations):
        if uuid := uuids.get(allocation.gpu_id or 0):
            since, until = allocation.since.timestamp(), allocation.until and allocation.until.timestamp()
            bands[uuid].append([since, until, "mine" if allocation.is_mine else "busy", holder_text(allocation)])
    happened = [
        _mark(page_event, uuids)
        for page_event in shown.events
        if page_event.words.tone != "notice" or page_event.event.kind == "boot"
    ]
    span = shown.span
    times = {"seconds": RANGES[span.name]} if span.name else {"from": span.start, "to": span.end}
    return {"span": times, "bands": bands, "marks": happened}


def _mark(page_event: NodePageEvent, uuids: dict[int, str]) -> list[Any]:
    event = page_event.event
    if event.kind == "agent.gap" and (missing := _missing(event)):
        return [*missing, None, "gap", page_event.words.title, True]
    until = None if event.is_open else event.last_at.timestamp()
    uuid = uuids.get(event.gpu_id) if event.gpu_id else None
    return [event.at.timestamp(), until, uuid, page_event.words.tone, page_event.words.title, event.kind in OPENS]


def _missing(event: NodeEvent) -> list[float]:
    """Return [start, end] of missing samples."""
    times = [untrusted.number(event.data.get(name), untrusted.MAX_UNIX_TIME) for name in ("from", "to")]
    return [second for second in times if second is not None] if None not in times else []


def holder_text(allocation: AllocationSpan) -> str:
    """Return the job in a few words."""
    if not allocation.is_visible:
        return "in use"
    return f"{allocation.name} ({allocation.user})" if allocation.user else allocation.name


def processes(shown: MachineView) -> list[GpuProcessRow]:
    """Return the processes on its GPUs, as last reported."""
    by_uuid = {gpu.uuid: gpu for gpu in shown.present_gpus}
    found = []
    for process in shown.agent.processes[:MAX_PROCESSES]:
        gpu = by_uuid.get(process["gpu"])
        if gpu is not None and not shown.hides(gpu):
            found.append(_process(shown, gpu, process))
    return sorted(found, key=lambda row: (row.gpu or 0, row.pid))


def _process(shown: MachineView, gpu: Gpu, process: dict[str, Any]) -> GpuProcessRow:
    job_id = process["job"]
    allocation = next((holder for holder in shown.holders.get(gpu.pk, []) if holder.scheduler_id == job_id), None)
    mib = process["memory_mib"]
    memory = formatting.memory(None if mib is None else mib * 2**20)
    return GpuProcessRow(
        gpu.index, process["pid"], untrusted.line(process["name"]), process["user"], memory, allocation, job_id
    )


def visits(shown: MachineView) -> tuple[list[JobVisit], int]:
    """Return the jobs that ran here in this range, newest first, and how many allocations of others are hidden."""
    by_job: dict[str, list[AllocationSpan]] = {}
    for allocation in shown.allocations:
        if allocation.is_visible:
            by_job.setdefault(allocation.scheduler_id, []).append(allocation)
    hidden = sum(not allocation.is_visible for allocation in shown.allocations)
    index = {gpu.pk: gpu.index for gpu in shown.gpus}
    found = [_visit(allocations, index) for allocations in by_job.values()]
    others = gpu_allocations.jobs_without_gpus(shown.user, shown.agent.node, *shown.span.moments, by_job)
    found += [JobVisit(allocation, [], allocation.since, allocation.until) for allocation in others]
    return sorted(found, key=lambda visit: visit.since, reverse=True)[:MAX_JOBS], hidden


def _visit(allocations: Sequence[AllocationSpan], index: dict[int, int]) -> JobVisit:
    gpus = sorted({index[allocation.gpu_id] for allocation in allocations if allocation.gpu_id in index})
    ends = [allocation.until for allocation in allocations]
    until = None if None in ends else max(end for end in ends if end is not None)
    return JobVisit(allocations[0], gpus, min(allocation.since for allocation in allocations), until)


def topology(agent: Agent) -> list[list[str]]:
    """Return how each GPU is connected to each other; [] if what was reported is not a matrix."""
    matrix = agent.facts.get("topology")
    rows = matrix if isinstance(matrix, list) else []
    if not 1 < len(rows) <= MAX_MATRIX or not all(isinstance(row, list) and len(row) == len(rows) for row in rows):
        return []
    return [[untrusted.line(cell, 8) for cell in row] for row in rows]


def moment(second: float) -> datetime:
    return datetime.fromtimestamp(second, UTC)
