"""REST: node telemetry: newest values, GPUs and their allocations, curves, events, as each person may see them."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

from django.http import Http404, HttpResponse
from ninja import Query, Schema
from pydantic import Field

from jobs.api.runs.series import short
from jobs.listing.telemetry_access import access_of, earliest_report, visible_holdings
from jobs.listing.visibility import jobs_of
from nodes.api import agents
from nodes.models import Agent, Gpu, Holding, NodeEvent
from nodes.telemetry import read
from nodes.telemetry.fields import GPU_FIELDS, gpu_owner, host_owner
from portal.http.api import ApiRequest, PageQuery, Text, bad_field, json_response
from portal.http.openapi import deprecated, described
from portal.http.paging import SortOrder, page
from portal.models import User
from portal.series.envelope import Outline
from vigil_core.untrusted import plain

router = agents.machines  # one address, one router: agents post to some of these
NO_AGENT = {404: "No agent has ever reported from a node with this name."}
HOUR_S = 3600


class HolderShape(Schema):
    """A job that a GPU is allocated to, as far as you may see it."""

    scheduler_id: str
    job: int | None = Field(description="Vigil's job number, if it is a Vigil job that you can see.")
    user: str
    name: str
    since: datetime
    source: str = Field(description="Source of the allocation: launcher, scheduler (its indices), or processes.")


class ProcessShape(Schema):
    pid: int
    user: str
    name: str
    memory_mib: int | None
    job: str = Field(description="The scheduler's job id; empty: none.")


class MachineGpu(Schema):
    uuid: str
    index: int
    minor: int | None
    bus: str
    model: str
    memory_mib: int | None
    power_cap_watts: int | None
    slowdown_c: int | None
    is_lost: bool
    lost_at: datetime | None
    fault: str = Field(description="Fault according to its counters; empty: none. `vigil-agent check` fails on it.")
    newest: dict[str, int] = Field(description="Newest values by field; fields without data are missing.")
    counters: dict[str, Any] = Field(description="Slow counters as last reported: ECC, remapped rows, links.")
    counted_at: datetime | None
    holders: list[HolderShape]
    processes: list[ProcessShape]


class MachineGpuList(Schema):
    items: list[MachineGpu]
    next: str | None = None


class Telemetry(Schema):
    """The newest report of a node's agent."""

    node: str
    last_report_at: datetime | None = Field(description="Null: it has never reported.")
    heard_at: datetime | None = deprecated("last_report_at")
    is_silent: bool
    sampled_at: int | None = Field(description="Unix second of the newest sample.")
    host: dict[str, float]
    gpus: list[MachineGpu]
    facts: dict[str, Any]


class MachineSeriesQuery(Schema):
    """Curves of a node or its GPUs."""

    name: list[Text] = Field(
        ["gpu_percent"], max_length=32, description=f"{', '.join(GPU_FIELDS)}; or a host metric such as cpu_percent."
    )
    gpu: list[Text] = Field([], max_length=64, description="Indices or UUIDs; default: all.")
    start: int | None = Field(None, ge=0, lt=2**40, alias="from", description="Unix second; default: an hour ago.")
    end: int | None = Field(None, ge=0, lt=2**40, alias="to", description="Unix second; default: now.")
    points: int = Field(
        500,
        ge=2,
        le=20_000,
        description="Approximate number of points; longer curves are reduced to min, max and mean.",
    )
    digits: int | None = Field(None, ge=3, le=15, description="Round to this many significant digits.")


class MachineLine(Schema):
    """A curve: `value` if each point is a single sample, else `min`, `max` and `mean` of intervals."""

    name: str
    gpu: int | None = Field(None, description="The GPU's index; null: the curve belongs to the node.")
    uuid: str | None = None
    step: list[int] = Field(description="Unix seconds at which each interval begins.")
    value: list[float | None] | None = None
    min: list[float | None] | None = None
    max: list[float | None] | None = None
    mean: list[float | None] | None = None


class MachineLines(Schema):
    items: list[MachineLine]
    next: str | None = None


class MachineEventShape(Schema):
    """Something that happened on a node; equal events close together are one, with a count."""

    id: int
    kind: str
    code: int | None = Field(description="The number of an Xid or SXid.")
    gpu: int | None = Field(description="The GPU's index.")
    uuid: str | None
    text: str
    at: datetime
    last_at: datetime
    is_open: bool = Field(description="Still ongoing.")
    count: int
    is_confirmed: bool = Field(description="Reported by both kernel log and NVML.")
    data: dict[str, Any]


class MachineEvents(Schema):
    items: list[MachineEventShape]
    next: str | None


class MachineEventQuery(PageQuery):
    kind: Text = Field("", description="xid, sxid, gpu.lost, mount.slow …")


@router.get(
    "/{str:name}/telemetry",
    response=Telemetry,
    summary="A node's current telemetry",
    openapi_extra=described(errors=NO_AGENT),
)
def telemetry(request: ApiRequest, name: str) -> dict[str, Any]:
    """Return the node's newest values, its GPUs with their allocations, and the facts that its agent reported."""
    agent = agent_of(name)
    return {
        "node": agent.node,
        "last_report_at": agent.heard_at,
        "heard_at": agent.heard_at,
        "is_silent": agent.is_silent(),
        "sampled_at": agent.sampled_at,
        "host": agent.newest.get("host", {}),
        "gpus": gpu_shapes(request.auth, agent),
        "facts": agent.facts,
    }


@router.get(
    "/{str:name}/gpus",
    response=MachineGpuList,
    summary="A node's GPUs and their allocations",
    openapi_extra=described(errors=NO_AGENT),
)
def gpus(request: ApiRequest, name: str) -> dict[str, Any]:
    """Return the node's current GPUs, in NVML's order."""
    return {"items": gpu_shapes(request.auth, agent_of(name))}


@router.get(
    "/{str:name}/series",
    response=MachineLines,
    summary="Curves of a node and its GPUs",
    openapi_extra=described(errors=NO_AGENT),
)
def series(request: ApiRequest, name: str, query: Query[MachineSeriesQuery]) -> HttpResponse:
    """Return each second of the last two days, minutes for 90 days, ten minutes for two years, as far as requested.

    Times when a GPU was allocated to somebody else's job are left out if the site hides other people's jobs.
    """
    agent, (start, end) = agent_of(name), span(query)
    rows = [(gpu, field) for field in query.name if field in GPU_FIELDS for gpu in chosen(agent, query.gpu)]
    host_fields = [field for field in dict.fromkeys(query.name) if field not in GPU_FIELDS]
    keys = [(gpu_owner(gpu.pk), field) for gpu, field in rows] + [
        (host_owner(agent.pk), field) for field in host_fields
    ]
    curves = read.curves(agent, keys, start=start, end=end, points=query.points)
    outlines = [curves[key].outline for key in keys[: len(rows)]]
    # An interval may begin before the requested range and end after it.
    first = min((int(outline.first.min()) for outline in outlines if len(outline.first)), default=start)
    last = max((int(outline.last.max()) for outline in outlines if len(outline.last)), default=end)
    access = access_of(request.auth, [gpu.pk for gpu, _ in rows], min(start, first), max(end, last))
    items = [
        line(field, access.outline(gpu.pk, curves[gpu_owner(gpu.pk), field].outline), query.digits, gpu=gpu)
        for gpu, field in rows
    ]
    items += [line(field, curves[host_owner(agent.pk), field].outline, query.digits) for field in host_fields]
    return json_response({"items": items, "next": None})


@router.get(
    "/{str:name}/events",
    response=MachineEvents,
    summary="A node's events, newest first",
    openapi_extra=described(errors=NO_AGENT),
)
def events(request: ApiRequest, name: str, query: Query[MachineEventQuery]) -> dict[str, Any]:
    """Return Xids, lost GPUs, silent drivers, slow mounts and gaps in the agent's reports."""
    rows = NodeEvent.objects.filter(agent=agent_of(name)).select_related("gpu")
    if query.kind:
        rows = rows.filter(kind=query.kind)
    found = page(rows, SortOrder("at", descending=True), cursor=query.cursor, limit=query.limit)
    return {"items": event_shapes(request.auth, found.items), "next": found.next}


def agent_of(name: str) -> Agent:
    agent = Agent.objects.filter(node=plain(name)).first()
    if agent is None:
        raise Http404
    return agent


def span(query: MachineSeriesQuery) -> tuple[int, int]:
    """Return the requested time range in Unix seconds. Raises Problem."""
    end = query.end if query.end is not None else int(time.time())
    start = query.start if query.start is not None else end - HOUR_S
    if start > end:
        raise bad_field("from", f"{start} is after to = {end}. Swap them.")
    return start, end


def chosen(agent: Agent, names: list[str]) -> list[Gpu]:
    """Return the requested GPUs, by index or UUID; removed ones by UUID only."""
    rows = list(agent.gpus.all())
    if not names:
        return [gpu for gpu in rows if gpu.gone_at is None]
    found = [gpu for gpu in rows if gpu.uuid in names or (gpu.gone_at is None and str(gpu.index) in names)]
    if not found:
        there = ", ".join(str(gpu.index) for gpu in rows if gpu.gone_at is None)
        raise bad_field("gpu", f"{agent.node} has no such GPU. It has {there or 'none'}.")
    return found


def gpu_shapes(user: User, agent: Agent) -> list[dict[str, Any]]:
    """Return a node's GPUs as one person may see them."""
    gpus = list(agent.gpus.filter(gone_at=None))
    now = time.time()
    access = access_of(user, [gpu.pk for gpu in gpus], earliest_report(now, [agent]), now)
    holders = holders_of(user, gpus)
    return [
        gpu_shape(
            agent, gpu, holders.get(gpu.pk, []), is_hidden=access.hides_newest(gpu.pk, now, agent.sampled_at)
        )
        for gpu in gpus
    ]  # fmt: skip


def holders_of(user: User, gpus: list[Gpu]) -> dict[int, list[dict[str, Any]]]:
    """Return the current allocations of these GPUs, by GPU, as far as this person may see them."""
    holdings = list(visible_holdings(user).filter(gpu__in=gpus, until=None))
    jobs = jobs_of(user, (holding.scheduler_id for holding in holdings))
    found: dict[int, list[dict[str, Any]]] = {}
    for holding in holdings:
        found.setdefault(holding.gpu_id, []).append(_holder_shape(holding, jobs.get(holding.scheduler_id)))
    return found


def _holder_shape(holding: Holding, job: Any) -> dict[str, Any]:
    return {
        "scheduler_id": holding.scheduler_id,
        "job": job.pk if job else None,
        "user": job.owner.username if job else holding.user,
        "name": job.name if job else holding.name,
        "since": holding.since,
        "source": holding.source,
    }


def gpu_shape(agent: Agent, gpu: Gpu, holders: list[dict[str, Any]], *, is_hidden: bool) -> dict[str, Any]:
    """Return one GPU with the newest report of its node's agent."""
    same = (
        "uuid",
        "index",
        "minor",
        "bus",
        "model",
        "memory_mib",
        "power_cap_watts",
        "slowdown_c",
        "fault",
        "lost_at",
        "counted_at",
    )
    newest = {} if is_hidden else agent.newest.get("gpus", {}).get(gpu.uuid, {})
    processes = [] if is_hidden else [process for process in agent.processes if process["gpu"] == gpu.uuid]
    return {name: getattr(gpu, name) for name in same} | {
        "is_lost": gpu.lost_at is not None,
        "newest": {name: value for name, value in newest.items() if name in GPU_FIELDS},
        "counters": gpu.counters,
        "holders": holders,
        "processes": processes,
    }


def line(name: str, outline: Outline, digits: int | None, *, gpu: Gpu | None = None) -> dict[str, Any]:
    """Return a curve as JSON."""
    about = {"name": name, "gpu": gpu.index if gpu else None, "uuid": gpu.uuid if gpu else None}
    columns = {"value": outline.min} if bool((outline.n == 1).all()) else {
        "min": outline.min, "max": outline.max, "mean": outline.mean()
    }  # fmt: skip
    return {**about, "step": outline.first.tolist(), **{key: short(column, digits) for key, column in columns.items()}}


def event_shapes(user: User, found: list[NodeEvent]) -> list[dict[str, Any]]:
    """Return events as one person may see them: kernel messages may name other people's processes."""
    start = min((event.at.timestamp() for event in found), default=0)
    end = max((event.last_at.timestamp() for event in found), default=0)
    access = access_of(user, {event.gpu_id for event in found if event.gpu_id}, start, end)
    return [_event_shape(event, is_hidden=access.hides_text(event)) for event in found]


def _event_shape(event: NodeEvent, *, is_hidden: bool) -> dict[str, Any]:
    same = ("id", "kind", "code", "at", "last_at", "is_open", "count", "is_confirmed")
    return {name: getattr(event, name) for name in same} | {
        "gpu": event.gpu.index if event.gpu else None,
        "uuid": event.gpu.uuid if event.gpu else None,
        "text": "" if is_hidden else event.text,
        "data": {} if is_hidden else event.data,
    }
