"""What machines told of themselves around the end: Xids, lost GPUs, slow mounts; memory and heat near their limits."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

import numpy as np

from diagnosis.corroboration import GPUS_WATCHED, NO_GPUS
from diagnosis.logs.prefixes import Prefix
from diagnosis.signatures.catalogue import Catalogue
from diagnosis.signs.sign import Sign
from jobs import allocations
from jobs.models import Attempt, Incident
from jobs.postmortem.evidence.collected import AROUND, Evidence, some
from nodes.health import temperature
from nodes.models import Agent, Gpu, Holding, NodeEvent
from nodes.telemetry import read
from nodes.telemetry.fields import gpu_owner, host_owner
from nodes.telemetry.read import Key, TelemetryCurve

MOST_EVENTS = 200
MOST_AGENTS = 16  # whose curves are read
LAST_S = 120  # before the end, in which memory counts as full by then
NEARLY_FULL = 0.98


def events_of_machines(incident: Incident, catalogue: Catalogue, found: Evidence) -> None:
    """Xids, lost GPUs and slow mounts of its nodes, from ten minutes before the end on."""
    attempt = incident.attempt
    since, until = incident.at - AROUND, incident.at + AROUND
    if not attempt.nodes:
        return
    heard = set(Agent.objects.filter(node__in=attempt.nodes, heard_at__gte=since).values_list("node", flat=True))
    if silent := [node for node in attempt.nodes if node not in heard]:
        found.not_seen.append(f"what the machine did on {some(silent)}: no agent told of it")
    else:
        found.seen.add("machines")
    _note_watched(attempt, incident.at, found)
    rows = NodeEvent.objects.filter(agent__node__in=attempt.nodes, at__lte=until, last_at__gte=since)
    events = list(rows.select_related("agent", "gpu").order_by("at")[:MOST_EVENTS])
    others = _of_others(attempt, events)
    for event in events:
        if event.pk not in others:
            found.signs += _of_event(event, catalogue)


def _asked_for_none(attempt: Attempt) -> bool:
    """Return whether the attempt is known to have asked for no GPUs."""
    return not attempt.job.is_attached and not attempt.job.spec.get("resources", {}).get("gpus_per_node")


def _note_watched(attempt: Attempt, ended_at: datetime, found: Evidence) -> None:
    """Note what a claim of broken hardware is checked against: whether it had GPUs, and whether agents watched."""
    if _asked_for_none(attempt) and not allocations.allocated_to([attempt]).get(attempt.pk):
        found.seen.add(NO_GPUS)
    heard = Agent.objects.filter(node__in=attempt.nodes, heard_at__gte=ended_at).values_list("node", flat=True)
    if set(attempt.nodes) <= set(heard):
        found.seen.add(GPUS_WATCHED)


def _of_others(attempt: Attempt, events: Sequence[NodeEvent]) -> set[int]:
    """The events of GPUs that another job held on the same machine; all of GPUs where it had none."""
    with_gpu = [event for event in events if event.gpu_id is not None]
    if not with_gpu:
        return set()
    first, last = min(event.at for event in with_gpu), max(event.last_at for event in with_gpu)
    held = Holding.objects.between(first, last + timedelta(seconds=1)).filter(gpu__in={one.gpu_id for one in with_gpu})
    whose: dict[int, list[Holding]] = {}
    for holding in held:
        whose.setdefault(holding.gpu_id, []).append(holding)
    mine = {one.gpu_id for one in allocations.allocated_to([attempt]).get(attempt.pk, [])}
    if not mine and _asked_for_none(attempt):
        return {event.pk for event in with_gpu}
    found = set()
    for event in with_gpu:
        theirs = [one for one in whose.get(event.gpu_id or 0, ()) if one.scheduler_id != attempt.scheduler_id]
        if event.gpu_id not in mine and (theirs or mine):
            found.add(event.pk)
    return found


def _of_event(event: NodeEvent, catalogue: Catalogue) -> list[Sign]:
    prefix = Prefix(node=event.agent.node, stamp=event.at.timestamp(), is_dated=True)
    name, at = f"kernel of {event.agent.node}", event.at.timestamp()
    if event.kind == "gpu.lost":
        text = f"GPU {event.gpu.index if event.gpu else '?'} was lost"
        return [Sign(name, 0, text, "gpu.off_bus", "root", prefix, at=at, source_kind="kernel")]
    if event.kind == "mount.slow":
        text = f"{event.text or 'a mount'} was slow"
        return [Sign(name, 0, text, "storage.io", "confirmation", prefix, at=at, source_kind="kernel")]
    if event.kind not in {"xid", "sxid"}:
        return []
    bus = event.gpu.bus if event.gpu else "0000:00:00"
    what = "Xid" if event.kind == "xid" else "SXid"
    line = f"NVRM: {what} (PCI:{bus}): {event.code}, {event.text}"
    return [
        Sign(name, 0, line, entry.cause, entry.role, prefix, entry, count=event.count, at=at, source_kind="kernel")
        for entry in catalogue.entries_on(line.encode())
        if entry.scope == "kernel"
    ]


# Their curves.


def curves_of_machines(incident: Incident, catalogue: Catalogue, found: Evidence) -> None:
    """Memory that was nearly full by the end, and GPUs at the temperature where they slow down."""
    attempt = incident.attempt
    if not attempt.nodes:
        return
    since = incident.at - AROUND
    agents = Agent.objects.filter(node__in=attempt.nodes, heard_at__gte=since).order_by("node")
    gpus: dict[int, list[Gpu]] = {}
    for holding in allocations.allocated_to([attempt]).get(attempt.pk, []):
        gpus.setdefault(holding.agent_id, []).append(holding.gpu)
    for agent in agents[:MOST_AGENTS]:
        found.signs += _of_agent(agent, gpus.get(agent.pk, []), round(incident.at.timestamp()))


def _of_agent(agent: Agent, gpus: Sequence[Gpu], end: int) -> list[Sign]:
    host = host_owner(agent.pk)
    names: list[Key] = [(host, name) for name in ("memory_used_mib", "memory_total_mib")]
    names += [(host, name) for name in ("shm_used_mib", "shm_total_mib")]
    names += [(gpu_owner(gpu.pk), "temperature_c") for gpu in gpus if gpu.slowdown_c]
    curves = read.curves(agent, names, start=end - int(AROUND.total_seconds()), end=end, points=None)
    signs = []
    for what, cause, file in (("memory", "memory.host_oom", "memory"), ("shm", "memory.shm", "/dev/shm")):
        used, total = (_most(curves[host, f"{what}_{kind}_mib"], end - LAST_S) for kind in ("used", "total"))
        if used is not None and total and used >= NEARLY_FULL * total:
            text = f"{file} of {agent.node} was {used / total:.0%} full in the last {LAST_S // 60} minutes"
            signs.append(_of_curve(agent, text, cause, end))
    for gpu in gpus:
        hottest = _most(curves[gpu_owner(gpu.pk), "temperature_c"], 0) if gpu.slowdown_c else None
        if hottest is not None and gpu.slowdown_c and temperature.is_hot(hottest, gpu.slowdown_c):
            text = f"GPU {gpu.index} of {agent.node} was at {hottest:.0f} °C; it slows down at {gpu.slowdown_c} °C"
            signs.append(_of_curve(agent, text, "gpu.thermal", end))
    return signs


def _most(curve: TelemetryCurve, since: int) -> float | None:
    """The highest value from a moment on."""
    values = curve.outline.max[curve.outline.last >= since]
    values = values[np.isfinite(values)]
    return float(values.max()) if len(values) else None


def _of_curve(agent: Agent, text: str, cause: str, end: int) -> Sign:
    prefix = Prefix(node=agent.node, stamp=float(end), is_dated=True)
    return Sign(f"telemetry of {agent.node}", 0, text, cause, "confirmation", prefix, source_kind="telemetry")
