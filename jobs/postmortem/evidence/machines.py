"""Collect agents' reports around the end: Xids, lost GPUs, slow mounts; memory and temperature near their limits."""

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
from jobs.postmortem.evidence.collected import NEAR_END, IncidentEvidence, first_few
from nodes.health import temperature
from nodes.models import Agent, Gpu, Holding, NodeEvent
from nodes.telemetry import read
from nodes.telemetry.fields import gpu_owner, host_owner
from nodes.telemetry.read import SeriesKey, TelemetryCurve

MAX_EVENTS = 200
MAX_AGENTS = 16  # whose curves are read
LAST_S = 120  # before the end, in which full memory counts
NEARLY_FULL = 0.98


def collect_machine_events(incident: Incident, catalogue: Catalogue, found: IncidentEvidence) -> None:
    """Add Xids, lost GPUs and slow mounts of the attempt's nodes within ten minutes of the end."""
    attempt = incident.attempt
    since, until = incident.at - NEAR_END, incident.at + NEAR_END
    if not attempt.nodes:
        return
    reporting = set(Agent.objects.filter(node__in=attempt.nodes, heard_at__gte=since).values_list("node", flat=True))
    if silent := [node for node in attempt.nodes if node not in reporting]:
        found.unavailable.append(f"machine events on {first_few(silent)}: no agent reported")
    else:
        found.available.add("machines")
    _note_monitoring(attempt, incident.at, found)
    rows = NodeEvent.objects.filter(agent__node__in=attempt.nodes, at__lte=until, last_at__gte=since)
    events = list(rows.select_related("agent", "gpu").order_by("at")[:MAX_EVENTS])
    others = _events_of_other_jobs(attempt, events)
    for event in events:
        if event.pk not in others and not event.is_planted:
            found.signs += _signs_of_event(event, catalogue)


def _requested_no_gpus(attempt: Attempt) -> bool:
    """Return whether the attempt is known to have requested no GPUs."""
    return not attempt.job.is_attached and not attempt.job.spec.get("resources", {}).get("gpus_per_node")


def _note_monitoring(attempt: Attempt, ended_at: datetime, found: IncidentEvidence) -> None:
    """Note whether the job had GPUs and agents were reporting; claims of broken hardware are checked against this."""
    if _requested_no_gpus(attempt) and not allocations.allocated_to([attempt]).get(attempt.pk):
        found.available.add(NO_GPUS)
    reporting = Agent.objects.filter(node__in=attempt.nodes, heard_at__gte=ended_at).values_list("node", flat=True)
    if set(attempt.nodes) <= set(reporting):
        found.available.add(GPUS_WATCHED)


def _events_of_other_jobs(attempt: Attempt, events: Sequence[NodeEvent]) -> set[int]:
    """Return events of GPUs that another job had on the same machine; all events of GPUs if this job had none."""
    with_gpu = [event for event in events if event.gpu_id is not None]
    if not with_gpu:
        return set()
    first, last = min(event.at for event in with_gpu), max(event.last_at for event in with_gpu)
    allocations_then = Holding.objects.between(first, last + timedelta(seconds=1)).filter(
        gpu__in={event.gpu_id for event in with_gpu}
    )
    by_gpu: dict[int, list[Holding]] = {}
    for holding in allocations_then:
        by_gpu.setdefault(holding.gpu_id, []).append(holding)
    job_gpus = {event.gpu_id for event in allocations.allocated_to([attempt]).get(attempt.pk, [])}
    if not job_gpus and _requested_no_gpus(attempt):
        return {event.pk for event in with_gpu}
    events_of_others = set()
    for event in with_gpu:
        others = [event for event in by_gpu.get(event.gpu_id or 0, ()) if event.scheduler_id != attempt.scheduler_id]
        if event.gpu_id not in job_gpus and (others or job_gpus):
            events_of_others.add(event.pk)
    return events_of_others


def _signs_of_event(event: NodeEvent, catalogue: Catalogue) -> list[Sign]:
    prefix = Prefix(node=event.agent.node, stamp=event.at.timestamp(), is_dated=True)
    name, at = f"kernel of {event.agent.node}", event.at.timestamp()
    if event.kind == "gpu.lost":
        text = f"GPU {event.gpu.index if event.gpu else '?'} was lost"
        return [Sign(name, 0, text, cause="gpu.off_bus", role="root", prefix=prefix, at=at, source_kind="kernel")]
    if event.kind == "mount.slow":
        text = f"{event.text or 'a mount'} was slow"
        return [
            Sign(name, 0, text, cause="storage.io", role="confirmation", prefix=prefix, at=at, source_kind="kernel")
        ]
    if event.kind not in {"xid", "sxid"}:
        return []
    bus = event.gpu.bus if event.gpu else "0000:00:00"
    what = "Xid" if event.kind == "xid" else "SXid"
    line = f"NVRM: {what} (PCI:{bus}): {event.code}, {event.text}"
    return [
        Sign(
            name,
            0,
            line,
            cause=entry.cause,
            role=entry.role,
            prefix=prefix,
            entry=entry,
            count=event.count,
            at=at,
            source_kind="kernel",
        )
        for entry in catalogue.entries_matching(line.encode())
        if entry.scope == "kernel"
    ]


# Curves of memory and temperature.


def collect_machine_curves(incident: Incident, catalogue: Catalogue, found: IncidentEvidence) -> None:
    """Add memory that was nearly full at the end, and GPUs at the temperature where they slow down."""
    attempt = incident.attempt
    if not attempt.nodes:
        return
    since = incident.at - NEAR_END
    agents = Agent.objects.filter(node__in=attempt.nodes, heard_at__gte=since).order_by("node")
    gpus: dict[int, list[Gpu]] = {}
    for holding in allocations.allocated_to([attempt]).get(attempt.pk, []):
        gpus.setdefault(holding.agent_id, []).append(holding.gpu)
    for agent in agents[:MAX_AGENTS]:
        found.signs += _signs_of_curves(agent, gpus.get(agent.pk, []), round(incident.at.timestamp()))


def _signs_of_curves(agent: Agent, gpus: Sequence[Gpu], end: int) -> list[Sign]:
    host = host_owner(agent.pk)
    names: list[SeriesKey] = [(host, name) for name in ("memory_used_mib", "memory_total_mib")]
    names += [(host, name) for name in ("shm_used_mib", "shm_total_mib")]
    names += [(gpu_owner(gpu.pk), "temperature_c") for gpu in gpus if gpu.slowdown_c]
    curves = read.curves(agent, names, start=end - int(NEAR_END.total_seconds()), end=end, points=None)
    signs = []
    for what, cause, file in (("memory", "memory.host_oom", "memory"), ("shm", "memory.shm", "/dev/shm")):
        used, total = (_highest(curves[host, f"{what}_{kind}_mib"], end - LAST_S) for kind in ("used", "total"))
        if used is not None and total and used >= NEARLY_FULL * total:
            text = f"{file} of {agent.node} was {used / total:.0%} full in the last {LAST_S // 60} minutes"
            signs.append(_sign_of_curve(agent, text, cause, end))
    for gpu in gpus:
        hottest = _highest(curves[gpu_owner(gpu.pk), "temperature_c"], 0) if gpu.slowdown_c else None
        if hottest is not None and gpu.slowdown_c and temperature.is_hot(hottest, gpu.slowdown_c):
            text = f"GPU {gpu.index} of {agent.node} was at {hottest:.0f} °C; it slows down at {gpu.slowdown_c} °C"
            signs.append(_sign_of_curve(agent, text, "gpu.thermal", end))
    return signs


def _highest(curve: TelemetryCurve, since: int) -> float | None:
    """Return the highest value since a moment, or None."""
    values = curve.outline.max[curve.outline.last >= since]
    values = values[np.isfinite(values)]
    return float(values.max()) if len(values) else None


def _sign_of_curve(agent: Agent, text: str, cause: str, end: int) -> Sign:
    prefix = Prefix(node=agent.node, stamp=float(end), is_dated=True)
    return Sign(
        f"telemetry of {agent.node}", 0, text, cause=cause, role="confirmation", prefix=prefix, source_kind="telemetry"
    )
