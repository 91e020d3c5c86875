"""Describe the machine: reported at each start, and whenever it changes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpus.reports import GpuInventory
from nodes.agent import disks, proc
from nodes.agent.cleaning import clean
from nodes.agent.host import KIB, memory_kib
from nodes.agent.version import VERSION

MAX_BYTES = 30 * 1024
NodeFacts = dict[str, Any]


def facts(
    *,
    node: str,
    machine: GpuInventory | None,
    gpus: list[NodeFacts],
    problems: dict[str, str],
    probed: tuple[str, ...],
    software: Mapping[str, Any],
    takes_faults: bool = False,
    proc_root: Path = Path("/proc"),
) -> NodeFacts:
    """Return the facts of this machine.

    `problems` maps what cannot be read to the reason; `probed`: the mounts that are timed; `software`: versions
    and adapters (nodes.agent.software); `takes_faults`: game days may plant faults here.
    """
    system = os.uname()
    mounted = {mount.path: mount.as_payload() for mount in disks.mounts(proc_root)}
    found: NodeFacts = {
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
        **software,
    }
    if takes_faults:
        found["game_day"] = True
    if machine is not None:
        found |= {"driver": machine.driver, "cuda": machine.cuda, "nvml": machine.nvml}
        found["topology"] = [list(row) for row in machine.topology]
    return _bounded(found)


def _bounded(document: NodeFacts) -> NodeFacts:
    """Shrink the facts to the size of an event: with very many GPUs drop the topology, then the GPUs' details."""
    if _size(document) > MAX_BYTES:
        document = {**document, "topology": []}
    if _size(document) > MAX_BYTES:
        document["gpus"] = [{name: gpu[name] for name in _ESSENTIAL if name in gpu} for gpu in document["gpus"]]
    return document


_ESSENTIAL = (
    "uuid", "index", "minor", "bus", "name", "memory_mib", "power_cap_watts", "slowdown_c", "mig", "vbios", "inforom"
)  # fmt: skip


def _size(document: NodeFacts) -> int:
    return len(json.dumps(document))


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
