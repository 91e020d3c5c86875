"""What the page of one machine is made of: its GPUs, what happened, who was there, as one person may see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from typing import Any

from django.db.models import Max, Q, Sum

from jobs.listing import held
from jobs.listing.held import Stretch
from jobs.listing.sight import Sight, earliest, sight
from nodes.models import Agent, Gpu, Node, NodeEvent
from nodes.presenting import events, figures, machine
from nodes.presenting.events import Words
from nodes.telemetry import read
from nodes.telemetry.events import OPENS
from nodes.telemetry.fields import GPU_FIELDS, host_owner
from portal.models import User
from vigil_core import formatting, untrusted

HOUR_S, DAY_S = 3600, 86_400
RANGES = {"1h": HOUR_S, "6h": 6 * HOUR_S, "24h": DAY_S, "7d": 7 * DAY_S, "30d": 30 * DAY_S, "90d": 90 * DAY_S}
USUAL = "1h"
MOST_EVENTS, MOST_MARKS, MOST_PROCESSES, MOST_JOBS, MOST_MATRIX = 100, 300, 100, 50, 16
NBSP = formatting.NBSP


@dataclass(frozen=True)
class Span:
    """The stretch of time that is shown, in Unix seconds; `name` is its choice, "" a stretch of somebody's own."""

    start: int
    end: int
    name: str

    @property
    def moments(self) -> tuple[datetime, datetime]:
        return moment(self.start), moment(self.end)

    @property
    def query(self) -> str:
        return f"from={self.start}&to={self.end}"


def span_of(query: Mapping[str, str], now: datetime) -> Span:
    """As the address says; what makes no sense there is the usual one."""
    second = int(now.timestamp()) + 1
    start, end = (untrusted.whole(query.get(name), untrusted.END_OF_TIME) for name in ("from", "to"))
    if start is not None and end is not None and start < end:
        return Span(start, end, "")
    name = query.get("range", "")
    name = name if name in RANGES else USUAL
    return Span(second - RANGES[name], second, name)


@dataclass(frozen=True)
class Happened:
    """An event of the machine, in words."""

    event: NodeEvent
    words: Words
    is_hidden: bool

    @property
    def lasted_s(self) -> float | None:
        """How long it lasted, of what does; None while it lasts."""
        event = self.event
        return (event.last_at - event.at).total_seconds() if event.kind in OPENS and not event.is_open else None


@dataclass(frozen=True)
class Process:
    """A process on a GPU. Its name and user are anybody's words."""

    gpu: int | None
    pid: int
    name: str
    user: str
    memory: str
    stretch: Stretch | None
    scheduler_id: str


@dataclass(frozen=True)
class Lane:
    """A GPU with its small charts, what it did last, and who has it."""

    gpu: Gpu
    charts: list[dict[str, Any]]
    newest: list[tuple[str, str, dict[str, Any]]]  # title, value, chart
    holders: list[Stretch]
    is_hidden: bool
    is_hot: bool


@dataclass(frozen=True)
class Visit:
    """A job that was on the machine, with all that it held there."""

    stretch: Stretch
    gpus: list[int]
    since: datetime
    until: datetime | None


@dataclass(frozen=True)
class Machine:
    """One machine in one stretch of time, before one person."""

    user: User
    node: Node | None
    agent: Agent
    span: Span
    now: datetime

    @cached_property
    def gpus(self) -> list[Gpu]:
        """Those that it has, and had within this time."""
        there = Q(gone_at=None) | Q(gone_at__gt=self.span.moments[0], first_seen_at__lt=self.span.moments[1])
        return list(self.agent.gpus.filter(there).order_by("gone_at", "index"))

    @property
    def has(self) -> list[Gpu]:
        return [gpu for gpu in self.gpus if gpu.gone_at is None]

    @property
    def is_silent(self) -> bool:
        return not self.agent.is_made_up and self.agent.is_silent(self.now)

    @cached_property
    def sight(self) -> Sight:
        now = self.now.timestamp()
        start = min(self.span.start, earliest(now, [self.agent]))
        return sight(self.user, [gpu.pk for gpu in self.gpus], start, max(self.span.end, now))

    def hides(self, gpu: Gpu) -> bool:
        """Whether what it does now is somebody else's business."""
        return self.sight.hides_newest(gpu.pk, self.now.timestamp(), self.agent.sampled_at)

    def newest(self, gpu: Gpu) -> dict[str, Any]:
        return {} if self.hides(gpu) else self.agent.newest.get("gpus", {}).get(gpu.uuid, {})

    @property
    def host(self) -> dict[str, float]:
        host: dict[str, float] = self.agent.newest.get("host", {})
        return host

    @cached_property
    def stretches(self) -> list[Stretch]:
        return held.stretches(self.user, self.agent, *self.span.moments)

    @cached_property
    def holders(self) -> dict[int | None, list[Stretch]]:
        """Who has each GPU now."""
        found: dict[int | None, list[Stretch]] = {}
        for one in held.stretches(self.user, self.agent, self.now, self.now):
            found.setdefault(one.gpu_id, []).append(one)
        return found

    @cached_property
    def happened(self) -> list[Happened]:
        """What happened in this time, and what lasts, the newest first."""
        start, end = self.span.moments
        rows = NodeEvent.objects.filter(agent=self.agent, at__lte=end).filter(Q(last_at__gte=start) | Q(is_open=True))
        found = list(rows.select_related("gpu").order_by("-at", "-id")[:MOST_MARKS])
        first = min((row.at.timestamp() for row in found), default=self.span.start)
        seen = sight(self.user, {row.gpu_id for row in found if row.gpu_id}, first, max(self.span.end, first))
        return [self._in_words(row, is_hidden=seen.hides_words(row)) for row in found]

    def _in_words(self, row: NodeEvent, *, is_hidden: bool) -> Happened:
        """The kernel's text names processes, which may be somebody else's."""
        text, data = ("", {}) if is_hidden else (row.text, row.data)
        return Happened(row, events.words(row.kind, row.code, text, data), is_hidden)


def facts_of(shown: Machine) -> machine.Facts:
    """What its sentence is made of."""
    node, agent = shown.node, shown.agent
    lasting = NodeEvent.objects.filter(agent=agent, is_open=True).order_by("at")
    by_node: dict[str, Any] = {} if node is None else said_by_scheduler(node)
    return machine.Facts(
        now=shown.now,
        is_told_of=True,
        heard_at=agent.heard_at,
        is_silent=shown.is_silent,
        driver_silent_at=next((row.at for row in lasting if row.kind == "gpu.silent"), None),
        gpus=[gpu_facts(shown, gpu) for gpu in shown.has],
        xids=driver_errors(agent, shown.now - machine.XIDS_FOR),
        hanging=[(events.mount_of(row.data), row.at) for row in lasting if row.kind == "mount.slow"],
        cpu_percent=shown.host.get("cpu_percent"),
        **by_node,
    )


def driver_errors(agent: Agent, since: datetime) -> list[machine.Xid]:
    """Return the Xids and SXids since then, one for each code and GPU, so that no flood of one hides another."""
    rows = NodeEvent.objects.filter(agent=agent, kind__in=("xid", "sxid"), last_at__gte=since).order_by()
    alike = rows.values_list("code", "gpu__index", "kind", "data__fatal").annotate(last=Max("last_at"), n=Sum("count"))
    return [
        machine.Xid(code, index, last, many, kind, is_fatal is True)
        for code, index, kind, is_fatal, last, many in alike[:MOST_MARKS]
    ]


def said_by_scheduler(node: Node) -> dict[str, Any]:
    """The part of the sentence that the scheduler knows."""
    free = (node.gpus_free, node.gpus, "GPU") if node.gpus else (node.cpus_free, node.cpus, "CPU")
    return {
        "state": node.state,
        "takes_jobs": node.takes_jobs,
        "reason": node.reason,
        "reason_by": node.reason_by,
        "reason_at": node.reason_at,
        "free": f"{formatting.count(free[0])} of {formatting.plural(free[1], free[2])}",
    }


def gpu_facts(shown: Machine, gpu: Gpu) -> machine.Gpu:
    newest = shown.newest(gpu)
    return machine.Gpu(
        index=gpu.index,
        percent=newest.get("gpu_percent"),
        temperature_c=newest.get("temperature_c"),
        slowdown_c=gpu.slowdown_c,
        throttle=newest.get("throttle") or 0,
        lost_at=gpu.lost_at,
        fault=gpu.fault,
        is_hidden=shown.hides(gpu),
    )


def lanes(shown: Machine) -> list[Lane]:
    """A row a GPU."""
    return [_lane(shown, gpu) for gpu in shown.gpus]


def _lane(shown: Machine, gpu: Gpu) -> Lane:
    charts = figures.of_gpu(
        gpu.uuid, gpu.index, key=str(gpu.pk), memory_mib=gpu.memory_mib, slowdown_c=gpu.slowdown_c,
        cap_watts=gpu.power_cap_watts,
    )  # fmt: skip
    told = shown.newest(gpu) if gpu.gone_at is None else {}
    newest = [
        (field.title, field.text(told.get(field.name)), chart)
        for field, chart in zip(figures.FIELDS, charts, strict=True)
    ]
    hot = gpu_facts(shown, gpu).is_hot and not shown.hides(gpu)
    return Lane(gpu, charts, newest, shown.holders.get(gpu.pk, []), shown.hides(gpu), hot)


def host_figures(shown: Machine) -> list[dict[str, Any]]:
    """The charts of the machine itself."""
    names = read.names(host_owner(shown.agent.pk), [*shown.host])
    cpus = untrusted.count(shown.agent.facts.get("cpus"))
    memory = shown.host.get("memory_total_mib") or untrusted.count(shown.agent.facts.get("memory_mib"))
    drawn = figures.of_host([name for name in names if name not in GPU_FIELDS], cpus=cpus, memory_mib=memory)
    for line in (line for figure in drawn for line in figure["series"]):
        told = shown.host.get(line["name"])
        line["newest"] = formatting.measure(None if told is None else told * line["factor"])
    return drawn


def marks(shown: Machine) -> dict[str, Any]:
    """What charts of this time show besides curves: who held each GPU, and what happened."""
    uuids = {gpu.pk: gpu.uuid for gpu in shown.gpus}
    bands: dict[str, list[list[Any]]] = {uuid: [] for uuid in uuids.values()}
    for one in reversed(shown.stretches):
        if uuid := uuids.get(one.gpu_id or 0):
            look = "mine" if one.is_mine else "busy"
            bands[uuid].append([one.since.timestamp(), one.until and one.until.timestamp(), look, whose(one)])
    happened = [_mark(one, uuids) for one in shown.happened if one.words.tone != "notice" or one.event.kind == "boot"]
    span = shown.span
    times = {"seconds": RANGES[span.name]} if span.name else {"from": span.start, "to": span.end}
    return {"span": times, "bands": bands, "marks": happened}


def _mark(one: Happened, uuids: dict[int, str]) -> list[Any]:
    event = one.event
    if event.kind == "agent.gap" and (missing := _missing(event)):
        return [*missing, None, "gap", one.words.title, True]
    until = None if event.is_open else event.last_at.timestamp()
    uuid = uuids.get(event.gpu_id) if event.gpu_id else None
    return [event.at.timestamp(), until, uuid, one.words.tone, one.words.title, event.kind in OPENS]


def _missing(event: NodeEvent) -> list[float]:
    """From when to when samples are missing."""
    told = [untrusted.number(event.data.get(name), untrusted.END_OF_TIME) for name in ("from", "to")]
    return [second for second in told if second is not None] if None not in told else []


def whose(one: Stretch) -> str:
    """A holder in a few words."""
    if not one.is_told:
        return "in use"
    return f"{one.name} ({one.user})" if one.user else one.name


def processes(shown: Machine) -> list[Process]:
    """What runs on its GPUs, as it told last."""
    by_uuid = {gpu.uuid: gpu for gpu in shown.has}
    found = []
    for told in shown.agent.processes[:MOST_PROCESSES]:
        gpu = by_uuid.get(told["gpu"])
        if gpu is not None and not shown.hides(gpu):
            found.append(_process(shown, gpu, told))
    return sorted(found, key=lambda one: (one.gpu or 0, one.pid))


def _process(shown: Machine, gpu: Gpu, told: dict[str, Any]) -> Process:
    job_id = told["job"]
    stretch = next((one for one in shown.holders.get(gpu.pk, []) if one.scheduler_id == job_id), None)
    mib = told["memory_mib"]
    memory = formatting.memory(None if mib is None else mib * 2**20)
    return Process(gpu.index, told["pid"], untrusted.line(told["name"]), told["user"], memory, stretch, job_id)


def visits(shown: Machine) -> tuple[list[Visit], int]:
    """The jobs that were here in this time, the newest first; and how many stretches of others' were."""
    told: dict[str, list[Stretch]] = {}
    for one in shown.stretches:
        if one.is_told:
            told.setdefault(one.scheduler_id, []).append(one)
    hidden = sum(not one.is_told for one in shown.stretches)
    index = {gpu.pk: gpu.index for gpu in shown.gpus}
    found = [_visit(mine, index) for mine in told.values()]
    others = held.without_gpus(shown.user, shown.agent.node, *shown.span.moments, told)
    found += [Visit(one, [], one.since, one.until) for one in others]
    return sorted(found, key=lambda visit: visit.since, reverse=True)[:MOST_JOBS], hidden


def _visit(mine: Sequence[Stretch], index: dict[int, int]) -> Visit:
    gpus = sorted({index[one.gpu_id] for one in mine if one.gpu_id in index})
    ends = [one.until for one in mine]
    until = None if None in ends else max(end for end in ends if end is not None)
    return Visit(mine[0], gpus, min(one.since for one in mine), until)


def topology(agent: Agent) -> list[list[str]]:
    """How each GPU is connected to each, as it was told; nothing where that is no matrix."""
    told = agent.facts.get("topology")
    rows = told if isinstance(told, list) else []
    if not 1 < len(rows) <= MOST_MATRIX or not all(isinstance(row, list) and len(row) == len(rows) for row in rows):
        return []
    return [[untrusted.line(cell, 8) for cell in row] for row in rows]


def moment(second: float) -> datetime:
    return datetime.fromtimestamp(second, UTC)
