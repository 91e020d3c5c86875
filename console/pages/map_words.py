"""What the map of the cluster says in words: the sentence that leads it, and the few numbers that matter. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from console.pages.rack_map import RackMap, Row, kilowatts
from nodes.telemetry.mounts import SlowFileSystem
from vigil_core import formatting


@dataclass(frozen=True)
class Waiting:
    """What of the queue waits, as far as one may see it."""

    jobs: int = 0
    gpus: int = 0


def say(drawn: RackMap, slow: Sequence[SlowFileSystem], waiting: Waiting, now: datetime) -> tuple[str, str]:
    """The sentence that leads: what is broken, else that nothing is; then what is held and idle, and what waits."""
    rows = [row for column in drawn.columns for row in column.rows]
    if not rows:
        return "No node is known yet.", "The scheduler is asked within seconds of Vigil’s start."
    broken = [*_out(rows), *_damaged(rows, "lost"), *_damaged(rows, "broken"), *_silent(rows)]
    lead = _joined(broken) or _all_well(rows)
    hung = [f"{one.text(now)}." for one in slow if one.is_open]
    if hung:
        lead = " ".join(hung) if not broken else f"{lead} {' '.join(hung)}"
    return lead, " ".join(part for part in (_idle(rows), _waits(waiting), _warm(drawn)) if part)


def facts(drawn: RackMap, waiting: Waiting) -> list[tuple[str, str, str, str]]:
    """(title, value, what it is of, the page where it leads: by its name)."""
    rows = [row for column in drawn.columns for row in column.rows]
    devices = [device for column in drawn.columns for device in column.devices]
    if not devices:
        return _of_cpus(rows, waiting)
    told = [device.percent for device in devices if device.percent is not None]
    together = max((row.free for row in rows), default=0)
    free = sum(row.free for row in rows)
    out = sum(not row.machine.takes_jobs for row in rows)
    watts = kilowatts(devices)
    cap = sum([device.cap_watts or 0 for device in devices]) / 1000
    # As home and the list of nodes count: a machine that only its agent knows gets no jobs.
    in_all = formatting.plural(sum(row.machine.gpus for row in rows) or len(devices), "GPU")
    return [
        ("In use", formatting.count(sum(row.used for row in rows)), f"of {in_all}", "running"),
        ("Working", formatting.measure(sum(told) / 100) if told else "–", "by utilisation", ""),
        ("Free", formatting.count(free), f"{formatting.count(together)} together at most" if free else "", ""),
        ("Takes no jobs", formatting.count(out), f"of {formatting.plural(len(rows), 'node')}", "out" if out else ""),
        _waiting_fact(waiting),
        ("Power", formatting.measure(watts), f"of {formatting.measure(cap)}{formatting.NBSP}kW" if cap else "kW", ""),
    ]  # fmt: skip


def _of_cpus(rows: Sequence[Row], waiting: Waiting) -> list[tuple[str, str, str, str]]:
    cpus, used = (sum(getattr(row.machine, name) for row in rows) for name in ("cpus", "cpus_used"))
    out = sum(not row.machine.takes_jobs for row in rows)
    return [
        ("In use", formatting.count(used), f"of {formatting.plural(cpus, 'CPU')}", "running"),
        ("Takes no jobs", formatting.count(out), f"of {formatting.plural(len(rows), 'node')}", "out" if out else ""),
        _waiting_fact(waiting),
    ]


def _waiting_fact(waiting: Waiting) -> tuple[str, str, str, str]:
    jobs = formatting.plural(waiting.jobs, "job")
    if waiting.gpus:
        return "Waiting", formatting.count(waiting.gpus), f"GPU{'s' if waiting.gpus != 1 else ''} in {jobs}", "pending"
    value, _, unit = jobs.partition(formatting.NBSP)
    return "Waiting", value, unit, "pending"


def _out(rows: Sequence[Row]) -> list[str]:
    out = [row.machine for row in rows if not row.machine.is_in_service]
    if len(out) == 1:
        reason = f" ({out[0].reason.rstrip('.')})" if out[0].reason else ""
        return [f"{out[0].name} is {formatting.word(out[0].state)}{reason}"]
    if not out:
        return []
    names = f" ({formatting.listed([one.name for one in out])})" if len(out) < 4 else ""
    return [f"{formatting.plural(len(out), 'node')} are out of service{names}"]


def _damaged(rows: Sequence[Row], state: str) -> list[str]:
    """Name the GPUs that are lost, or broken."""
    found = [(row.name, device.index) for row in rows if state in row.states for device in row.in_state(state)]
    if len(found) == 1:
        return [f"GPU {found[0][1]} of {found[0][0]} is {state}"]
    nodes = list(dict.fromkeys(name for name, _ in found))
    where = f"on {nodes[0]}" if len(nodes) == 1 else f"on {formatting.plural(len(nodes), 'node')}"
    return [f"{formatting.plural(len(found), 'GPU')} are {state} {where}"] if found else []


def _silent(rows: Sequence[Row]) -> list[str]:
    silent = [row.machine for row in rows if row.machine.is_silent and row.machine.is_in_service]
    if len(silent) == 1 and (since := silent[0].silent_since):
        return [f"the agent of {silent[0].name} is silent since {formatting.clock(since)}"]
    return [f"{formatting.plural(len(silent), 'agent')} are silent"] if silent else []


def _all_well(rows: Sequence[Row]) -> str:
    return (
        "The node is in service." if len(rows) == 1 else f"All {formatting.plural(len(rows), 'node')} are in service."
    )


def _idle(rows: Sequence[Row]) -> str:
    idle = [device for row in rows if "wasted" in row.states for device in row.in_state("wasted")]
    if not idle:
        return ""
    lead = f"{formatting.plural(len(idle), 'GPU is', 'GPUs are')} held and idle"
    most = Counter(device.holder.user for device in idle if device.holder and device.holder.user).most_common(1)
    if not most:
        return f"{lead}."
    user, gpus = most[0]
    whose = f"by {user}" if gpus == len(idle) else f"{formatting.count(gpus)} of them by {user}"
    return f"{lead}, {whose}."


def _waits(waiting: Waiting) -> str:
    if not waiting.jobs:
        return "Nothing waits."
    jobs = formatting.plural(waiting.jobs, "job")
    if not waiting.gpus:
        return f"{jobs} {'waits' if waiting.jobs == 1 else 'wait'}."
    return f"{formatting.plural(waiting.gpus, 'GPU')} {'is' if waiting.gpus == 1 else 'are'} waited for in {jobs}."


def _warm(drawn: RackMap) -> str:
    warm = sorted((column for column in drawn.columns if column.is_warm), key=lambda column: -(column.off_c or 0))
    if not warm:
        return ""
    degrees = f"{warm[0].off_c:.1f}{formatting.NBSP}°C"
    more = f", and {formatting.plural(len(warm) - 1, 'more is', 'more are')} warm, too" if len(warm) > 1 else ""
    return f"{_rack(warm[0].name)} is {degrees} warmer than its neighbours{more}."


def _rack(name: str) -> str:
    return name if name.lower().startswith("rack") else f"Rack {name}"


def _joined(parts: Sequence[str]) -> str:
    if not parts:
        return ""
    text = formatting.listed(list(parts))
    return f"{text[0].upper()}{text[1:]}." if text.startswith("the ") else f"{text}."
