"""What the machine is: told at each start, and when it changes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from gpus.reports import GpuInventory
from nodes.agent import disks, proc
from nodes.agent.cleaning import clean
from nodes.agent.host import KIB, memory_kib
from nodes.agent.version import VERSION

MOST_BYTES = 30 * 1024
Facts = dict[str, Any]


def facts(
    *,
    node: str,
    machine: GpuInventory | None,
    gpus: list[Facts],
    problems: dict[str, str],
    probed: tuple[str, ...],
    proc_root: Path = Path("/proc"),
) -> Facts:
    """`problems`: what can't be told, and why; `probed`: the mounts whose answers are timed."""
    system = os.uname()
    mounted = {mount.path: mount.as_told() for mount in disks.mounts(proc_root)}
    told: Facts = {
        "host": node,
        "kernel": clean(f"{system.sysname} {system.release}", 128),
        "system": _system(),
        "agent": VERSION,
        "cpus": os.cpu_count() or 0,
        "cpu": _processor(proc_root),
        "memory_mib": memory_kib(proc_root).get("MemTotal", 0) // KIB,
        "mounts": [mounted.get(path, {"mount": disks.label(path)}) for path in probed],
        "problems": {name: clean(why, 300) for name, why in problems.items() if why},
        "gpus": gpus,
    }
    if machine is not None:
        told |= {"driver": machine.driver, "cuda": machine.cuda, "nvml": machine.nvml}
        told["topology"] = [list(row) for row in machine.topology]
    return _bounded(told)


def _bounded(told: Facts) -> Facts:
    """What an event has room for: of very many GPUs first the matrix goes, then what each is in detail."""
    if _size(told) > MOST_BYTES:
        told = {**told, "topology": []}
    if _size(told) > MOST_BYTES:
        told["gpus"] = [{name: gpu[name] for name in _NEEDED if name in gpu} for gpu in told["gpus"]]
    return told


_NEEDED = ("uuid", "index", "minor", "bus", "name", "memory_mib", "power_cap_watts", "slowdown_c", "mig")


def _size(told: Facts) -> int:
    return len(json.dumps(told))


def _processor(proc_root: Path) -> str:
    for line in proc.read(proc_root / "cpuinfo", 8192).splitlines():
        if line.startswith(("model name", "Model", "cpu\t")):
            return clean(line.partition(":")[2], 128)
    return ""


def _system() -> str:
    for line in proc.read("/etc/os-release", 8192).splitlines():
        if line.startswith("PRETTY_NAME="):
            return clean(line.partition("=")[2].strip("\"'"), 128)
    return ""
