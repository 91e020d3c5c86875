"""What one GPU is: its names, what holds for as long as it is there, its slices, and what it is connected to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpus.asking import Questions

MIB = 2**20
GPU_SENSOR = 0
SLOWDOWN = 1
NVLINK = 2
MOST_LINKS = 36
MOST_SLICES = 16
MEMORY_V2 = 0x0200_0028
LINKS = {"links": (91, 0)}
SLOWDOWN_MARGIN = {"margin": (194, 0)}
LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


def told(found: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is not told."""
    return {name: value for name, value in found.items() if value is not None}


def watts(milliwatts: int | None) -> int | None:
    return None if milliwatts is None else round(milliwatts / 1000)


def memory(questions: Questions) -> Any:
    """Total and used, without what the driver keeps for itself where it tells that apart."""
    apart = questions.ask("nvmlDeviceGetMemoryInfo", more=(MEMORY_V2,))
    return apart or questions.ask("nvmlDeviceGetMemoryInfo")


def names(questions: Questions) -> dict[str, Any]:
    """What it is called; a GPU that is lost tells none of it."""
    ask, size = questions.ask, memory(questions)
    pci = ask("nvmlDeviceGetPciInfo")
    return told(
        {
            "uuid": ask("nvmlDeviceGetUUID"),
            "index": ask("nvmlDeviceGetIndex"),
            "minor": ask("nvmlDeviceGetMinorNumber"),
            "bus": pci.busId if pci else None,
            "name": ask("nvmlDeviceGetName"),
            "memory_mib": size.total // MIB if size else None,
            "parent": _parent(questions),
        }
    )


def static(questions: Questions) -> dict[str, Any]:
    ask = questions.ask
    return told(
        {
            "serial": ask("nvmlDeviceGetSerial"),
            "vbios": ask("nvmlDeviceGetVbiosVersion"),
            "numa_node": ask("nvmlDeviceGetNumaNodeId"),
            "power_cap_watts": watts(ask("nvmlDeviceGetEnforcedPowerLimit")),
            "slowdown_c": _slowdown(questions),
        }
    )


def slices(questions: Questions) -> dict[str, Any]:
    """Whether it is cut up (MIG), and into what."""
    mode = questions.ask("nvmlDeviceGetMigMode")
    if mode is None:
        return {}
    count = (questions.ask("nvmlDeviceGetMaxMigDeviceCount") or 0) if mode[0] else 0
    found = [_slice(questions, place) for place in range(min(count, MOST_SLICES))]
    return {"mig": bool(mode[0]), "instances": [one for one in found if one]}


def links(questions: Questions) -> list[int]:
    """The state of each NVLink, 1 where it is up; empty where there is none."""
    count = min(int(questions.fields(LINKS).get("links", 0)), MOST_LINKS)
    states = [questions.ask("nvmlDeviceGetNvLinkState", more=(link,)) for link in range(count)]
    return [] if None in states else states


def topology(gpus: list[Questions]) -> list[list[str]]:
    """How each is connected to each, in nvidia-smi's words; "" is not told."""
    buses = [_bus(gpu.ask("nvmlDeviceGetPciInfo")) for gpu in gpus]
    ends = [_ends(gpu) for gpu in gpus]
    return [
        ["X" if a == b else _between(gpu, other, ends[a], buses[b]) for b, other in enumerate(gpus)]
        for a, gpu in enumerate(gpus)
    ]


def _between(gpu: Questions, other: Questions, ends: list[str], bus: str) -> str:
    if gpu.handle is None or other.handle is None:
        return ""
    if ends and gpu.ask("nvmlDeviceGetP2PStatus", more=(other.handle, NVLINK)) == 0:
        # Links that end at no GPU end at a switch, which all of them lead to.
        return f"NV{ends.count(bus) or len(ends)}"
    return LEVELS.get(gpu.ask("nvmlDeviceGetTopologyCommonAncestor", more=(other.handle,)), "")


def _ends(gpu: Questions) -> list[str]:
    """Where its NVLinks that are up lead to, by bus."""
    up = [link for link, state in enumerate(links(gpu)) if state]
    return [_bus(gpu.ask("nvmlDeviceGetNvLinkRemotePciInfo", more=(link,))) for link in up]


def _bus(pci: Any) -> str:
    return str(pci.busId) if pci else ""


def _parent(questions: Questions) -> str | None:
    """The GPU that a slice is a part of."""
    if not questions.ask("nvmlDeviceIsMigDeviceHandle"):
        return None
    whole = Questions()
    whole.handle = questions.ask("nvmlDeviceGetDeviceHandleFromMigDeviceHandle")
    uuid: str | None = whole.ask("nvmlDeviceGetUUID")
    return uuid


def _slowdown(questions: Questions) -> int | None:
    """The temperature at which it slows down; newer GPUs tell how far away that is, and no temperature."""
    temperature: int | None = questions.ask("nvmlDeviceGetTemperatureThreshold", more=(SLOWDOWN,))
    if temperature is None:
        now = questions.ask("nvmlDeviceGetTemperature", more=(GPU_SENSOR,))
        left = questions.ask("nvmlDeviceGetMarginTemperature")
        margin = questions.fields(SLOWDOWN_MARGIN).get("margin")
        if now is not None and left is not None and margin is not None:
            return int(now + left - margin)
    return temperature


def _slice(questions: Questions, place: int) -> dict[str, Any]:
    part = Questions()
    part.handle = questions.ask("nvmlDeviceGetMigDeviceHandleByIndex", more=(place,))
    size = memory(part)
    return told(
        {
            "uuid": part.ask("nvmlDeviceGetUUID"),
            "name": part.ask("nvmlDeviceGetName"),
            "memory_mib": size.total // MIB if size else None,
            "gpu_instance": part.ask("nvmlDeviceGetGpuInstanceId"),
            "compute_instance": part.ask("nvmlDeviceGetComputeInstanceId"),
        }
    )
