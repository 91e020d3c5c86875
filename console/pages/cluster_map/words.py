"""Describe the map of the cluster in words: the lead sentence and the key figures. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from console.pages.cluster_map.layout import MapRow, RackMap, kilowatts
from nodes.scheduling import node_states
from nodes.telemetry.mounts import SlowFileSystem
from vigil_core import formatting


@dataclass(frozen=True)
class PendingDemand:
    """Pending jobs and the GPUs they need, as far as this person may see them."""

    jobs: int = 0
    gpus: int = 0


def headline(drawn: RackMap, slow: Sequence[SlowFileSystem], waiting: PendingDemand, now: datetime) -> tuple[str, str]:
    """Return the page's lead: what is broken, or that nothing is; then idle allocations and pending jobs."""
    rows = [row for column in drawn.columns for row in column.rows]
    if not rows:
        return "No nodes yet.", "The scheduler is polled within seconds of Vigil’s start."
    broken = [*_out_of_service(rows), *_damaged(rows, "lost"), *_damaged(rows, "broken"), *_silent(rows)]
    lead = _joined(broken) or _all_in_service(rows)
    hung = [f"{event.text(now)}." for event in slow if event.is_open]
    if hung:
        lead = " ".join(hung) if not broken else f"{lead} {' '.join(hung)}"
    return lead, " ".join(
        part
        for part in (_idle_sentence(rows), _pending_sentence(waiting), _spare_sentence(rows), _warm_sentence(drawn))
        if part
    )


def facts(drawn: RackMap, waiting: PendingDemand) -> list[tuple[str, str, str, str]]:
    """Return (title, value, context, name of the page it links to) for each key figure."""
    rows = [row for column in drawn.columns for row in column.rows]
    devices = [device for column in drawn.columns for device in column.devices]
    if not devices:
        return _cpu_facts(rows, waiting)
    percents = [device.percent for device in devices if device.percent is not None]
    together = max((row.free for row in rows), default=0)
    free = sum(row.free for row in rows)
    out = sum(not row.machine.takes_jobs for row in rows)
    watts = kilowatts(devices)
    cap = sum([device.cap_watts or 0 for device in devices if device.watts is not None]) / 1000
    # Counted as on the home page and in the list of nodes: a machine that only its agent knows gets no jobs.
    in_all = formatting.plural(sum(row.machine.gpus for row in rows) or len(devices), "GPU")
    return [
        ("In use", formatting.count(sum(row.used for row in rows)), f"of {in_all}", "running"),
        ("Working", formatting.measure(sum(percents) / 100) if percents else "–", "by utilisation", ""),
        ("Free", formatting.count(free), f"at most {formatting.count(together)} on one node" if free else "", ""),
        ("Not schedulable", formatting.count(out), f"of {formatting.plural(len(rows), 'node')}", "out" if out else ""),
        _pending_fact(waiting),
        ("Power", formatting.measure(watts), f"of {formatting.measure(cap)}{formatting.NBSP}kW" if cap else "kW", ""),
    ]  # fmt: skip


def _cpu_facts(rows: Sequence[MapRow], waiting: PendingDemand) -> list[tuple[str, str, str, str]]:
    cpus, used = (sum(getattr(row.machine, name) for row in rows) for name in ("cpus", "cpus_used"))
    out = sum(not row.machine.takes_jobs for row in rows)
    return [
        ("In use", formatting.count(used), f"of {formatting.plural(cpus, 'CPU')}", "running"),
        ("Not schedulable", formatting.count(out), f"of {formatting.plural(len(rows), 'node')}", "out" if out else ""),
        _pending_fact(waiting),
    ]


def _pending_fact(waiting: PendingDemand) -> tuple[str, str, str, str]:
    jobs = formatting.plural(waiting.jobs, "job")
    if waiting.gpus:
        return "Pending", formatting.count(waiting.gpus), f"GPU{'s' if waiting.gpus != 1 else ''} for {jobs}", "pending"
    value, _, unit = jobs.partition(formatting.NBSP)
    return "Pending", value, unit, "pending"


def _out_of_service(rows: Sequence[MapRow]) -> list[str]:
    out = [
        row.machine for row in rows if not row.machine.is_in_service and not node_states.is_standby(row.machine.reason)
    ]
    if len(out) == 1:
        reason = f" ({out[0].reason.rstrip('.')})" if out[0].reason else ""
        return [f"{out[0].name} is {formatting.word(out[0].state)}{reason}"]
    if not out:
        return []
    names = f" ({formatting.listed([node.name for node in out])})" if len(out) < 4 else ""
    return [f"{formatting.plural(len(out), 'node')} are out of service{names}"]


def _spare_sentence(rows: Sequence[MapRow]) -> str:
    spares = sum(not row.machine.is_in_service and node_states.is_standby(row.machine.reason) for row in rows)
    return f"{formatting.plural(spares, 'hot spare stands', 'hot spares stand')} by." if spares else ""


def _damaged(rows: Sequence[MapRow], state: str) -> list[str]:
    """Name the GPUs that are lost or broken."""
    found = [(row.name, device.index) for row in rows if state in row.states for device in row.in_state(state)]
    if len(found) == 1:
        return [f"GPU {found[0][1]} of {found[0][0]} is {state}"]
    nodes = list(dict.fromkeys(name for name, _ in found))
    where = f"on {nodes[0]}" if len(nodes) == 1 else f"on {formatting.plural(len(nodes), 'node')}"
    return [f"{formatting.plural(len(found), 'GPU')} are {state} {where}"] if found else []


def _silent(rows: Sequence[MapRow]) -> list[str]:
    silent = [row.machine for row in rows if row.machine.is_silent and row.machine.is_in_service]
    if len(silent) == 1 and (since := silent[0].silent_since):
        return [f"the agent of {silent[0].name} has been silent since {formatting.clock(since)}"]
    return [f"{formatting.plural(len(silent), 'agent')} are silent"] if silent else []


def _all_in_service(rows: Sequence[MapRow]) -> str:
    if any(not row.machine.is_in_service for row in rows):
        return "All nodes but hot spares are in service."
    return (
        "The node is in service." if len(rows) == 1 else f"All {formatting.plural(len(rows), 'node')} are in service."
    )


def _idle_sentence(rows: Sequence[MapRow]) -> str:
    idle = [device for row in rows if "wasted" in row.states for device in row.in_state("wasted")]
    if not idle:
        return ""
    lead = f"{formatting.plural(len(idle), 'GPU is', 'GPUs are')} allocated but idle"
    most = Counter(device.holder.user for device in idle if device.holder and device.holder.user).most_common(1)
    if not most:
        return f"{lead}."
    user, gpus = most[0]
    if gpus == len(idle):
        return f"{lead}: {user}’s."
    return f"{lead}, {formatting.count(gpus)} of them {user}’s."


def _pending_sentence(waiting: PendingDemand) -> str:
    if not waiting.jobs:
        return "No pending jobs."
    jobs = formatting.plural(waiting.jobs, "pending job")
    if not waiting.gpus:
        return f"{jobs}."
    return f"{jobs} {'needs' if waiting.jobs == 1 else 'need'} {formatting.plural(waiting.gpus, 'GPU')}."


def _warm_sentence(drawn: RackMap) -> str:
    warm = sorted((column for column in drawn.columns if column.is_warm), key=lambda column: -(column.off_c or 0))
    if not warm:
        return ""
    degrees = f"{warm[0].off_c:.1f}{formatting.NBSP}°C"
    more = f"; {formatting.plural(len(warm) - 1, 'more is', 'more are')} also warm" if len(warm) > 1 else ""
    return f"{_rack(warm[0].name)} is {degrees} warmer than its neighbours{more}."


def _rack(name: str) -> str:
    return name if name.lower().startswith("rack") else f"Rack {name}"


def _joined(parts: Sequence[str]) -> str:
    if not parts:
        return ""
    text = formatting.listed(list(parts))
    return f"{text[0].upper()}{text[1:]}." if text.startswith("the ") else f"{text}."
