"""Choose what the charts of a node page show: series, units and limits. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nodes.presenting.gpu_fields import FIELDS, GIB_PER_MIB

MAX_LINES = 5
MARGIN_C = 5  # above the slowdown temperature, so that its line is visible
COOL_C = 20
COLORS = {"gpu_percent": 3, "memory_mib": 6, "temperature_c": 2, "watts": 5}


def of_gpu(
    uuid: str, index: int, *, key: str = "", memory_mib: int | None = None, slowdown_c: int | None = None,
    cap_watts: int | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the small charts of one GPU, on a common time axis; `key` distinguishes two GPUs of the same slot."""
    ranges: dict[str, list[float]] = {"gpu_percent": [0, 100], "watts": [0, cap_watts or 1]}
    ranges["memory_mib"] = [0, round(memory_mib * GIB_PER_MIB, 1) if memory_mib else 1]
    ranges["temperature_c"] = [COOL_C, slowdown_c + MARGIN_C if slowdown_c else COOL_C + 40]
    limits = {"temperature_c": slowdown_c, "watts": cap_watts}
    of = {**limits, "memory_mib": ranges["memory_mib"][1] if memory_mib else None}
    return [
        {
            "id": f"gpu-{key or index}-{field.name}",
            "title": f"{field.title} of GPU {index}",
            "gpu": uuid,
            "bare": True,
            "y": ranges[field.name],
            "unit": f"{field.unit} of {of[field.name]:g}" if of.get(field.name) else field.unit,
            "series": [_line(field.name, field.title, COLORS[field.name], field.factor) | {"digits": field.digits}],
            "limits": _limits("", limits.get(field.name)),
            "empty": "No samples in this range.",
        }
        for field in FIELDS
    ]


def of_host(names: Sequence[str], *, cpus: int | None, memory_mib: float | None) -> list[dict[str, Any]]:
    """Return the charts of the machine itself, for the values that it reports."""
    found = [
        _figure("cpu", "CPU", f"% of {cpus} cores" if cpus else "%", [("cpu_percent", "busy")], names, y=[0, 100]),
        _figure(
            "memory", "Memory", "GiB in use", [("memory_used_mib", "in use"), ("shm_used_mib", "/dev/shm")], names,
            factor=GIB_PER_MIB, first=6,
            limits=_limits("all", round(memory_mib * GIB_PER_MIB, 1) if memory_mib else None),
        ),
        _figure("network", "Network", "MiB per second", _labelled(names, _WIRES), names),
        _figure("disks", "Disks", "MiB per second", _labelled(names, _DISKS), names, first=3),
        _figure("mounts", "Shared mounts", "response time in ms", _labelled(names, _MOUNTS), names),
    ]  # fmt: skip
    return [figure for figure in found if figure["series"]]


_WIRES = {"ib_rx_mib": "in", "ib_tx_mib": "out", "net_rx_mib": "in", "net_tx_mib": "out"}
_DISKS = {"disk_read_mib": "read", "disk_write_mib": "written"}
_MOUNTS = {"mount_ms": ""}


def _labelled(names: Sequence[str], kinds: dict[str, str]) -> list[tuple[str, str]]:
    """Return labelled series of these kinds, such as "eth0 in", in the order of `kinds`."""
    order = list(kinds)
    found = []
    for name in names:
        kind, _, label = name.partition(":")
        if kind in kinds and label:
            found.append((order.index(kind) // 2, label, order.index(kind), name, f"{label} {kinds[kind]}".strip()))
    return [(name, label) for *_, name, label in sorted(found)]


def _figure(
    key: str, title: str, unit: str, wanted: Sequence[tuple[str, str]], names: Sequence[str], *, factor: float = 1.0,
    limits: Sequence[dict[str, Any]] = (), y: list[float] | None = None, first: int = 1,
) -> dict[str, Any]:  # fmt: skip
    there = [(name, label) for name, label in wanted if name in names]
    lines = [
        _line(name, label, (first - 1 + place) % 8 + 1, factor) for place, (name, label) in enumerate(there[:MAX_LINES])
    ]
    more = len(there) - len(lines)
    return {
        "id": key, "title": title, "unit": f"{unit}; {more} more are not shown" if more > 0 else unit, "y": y or [0, 1],
        "series": lines, "limits": list(limits), "empty": "No samples in this range.",
    }  # fmt: skip


def _line(name: str, label: str, color: int, factor: float) -> dict[str, Any]:
    return {"name": name, "label": label, "color": color, "factor": factor}


def _limits(label: str, value: float | None) -> list[dict[str, Any]]:
    return [] if value is None else [{"label": label, "value": value}]
