"""Read what one GPU is: names, static facts, MIG slices, NVLinks and topology."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpus.queries import NvmlQueries

MIB = 2**20
GPU_SENSOR = 0
SLOWDOWN = 1
NVLINK = 2
MAX_LINKS = 36
MAX_SLICES = 16
MEMORY_V2 = 0x0200_0028
LINKS = {"links": (91, 0)}
SLOWDOWN_MARGIN = {"margin": (194, 0)}
LEVELS = {0: "PIX", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}


def without_missing(found: Mapping[str, Any]) -> dict[str, Any]:
    """Drop entries that are None."""
    return {name: value for name, value in found.items() if value is not None}


def watts(milliwatts: int | None) -> int | None:
    return None if milliwatts is None else round(milliwatts / 1000)


def memory(queries: NvmlQueries) -> Any:
    """Return total and used memory, without the driver's reserve if it is reported separately."""
    without_reserve = queries.first_available("nvmlDeviceGetMemoryInfo", more=(MEMORY_V2,))
    return without_reserve or queries.first_available("nvmlDeviceGetMemoryInfo")


def names(queries: NvmlQueries) -> dict[str, Any]:
    """Return the GPU's names; a lost GPU reports none of them."""
    query, size = queries.first_available, memory(queries)
    pci = query("nvmlDeviceGetPciInfo")
    return without_missing(
        {
            "uuid": query("nvmlDeviceGetUUID"),
            "index": query("nvmlDeviceGetIndex"),
            "minor": query("nvmlDeviceGetMinorNumber"),
            "bus": pci.busId if pci else None,
            "name": query("nvmlDeviceGetName"),
            "memory_mib": size.total // MIB if size else None,
            "parent": _parent(queries),
        }
    )


def static(queries: NvmlQueries) -> dict[str, Any]:
    query = queries.first_available
    return without_missing(
        {
            "serial": query("nvmlDeviceGetSerial"),
            "vbios": query("nvmlDeviceGetVbiosVersion"),
            "inforom": query("nvmlDeviceGetInforomImageVersion"),
            "numa_node": query("nvmlDeviceGetNumaNodeId"),
            "power_cap_watts": watts(query("nvmlDeviceGetEnforcedPowerLimit")),
            "slowdown_c": _slowdown(queries),
        }
    )


def slices(queries: NvmlQueries) -> dict[str, Any]:
    """Return whether MIG is enabled, and its slices."""
    mode = queries.first_available("nvmlDeviceGetMigMode")
    if mode is None:
        return {}
    count = (queries.first_available("nvmlDeviceGetMaxMigDeviceCount") or 0) if mode[0] else 0
    found = [_slice(queries, index) for index in range(min(count, MAX_SLICES))]
    return {"mig": bool(mode[0]), "instances": [mig_slice for mig_slice in found if mig_slice]}


def links(queries: NvmlQueries) -> list[int]:
    """Return the state of each NVLink, 1 if it is up; empty if there is none."""
    count = min(int(queries.fields(LINKS).get("links", 0)), MAX_LINKS)
    states = [queries.first_available("nvmlDeviceGetNvLinkState", more=(link,)) for link in range(count)]
    return [] if None in states else states


def topology(gpus: list[NvmlQueries]) -> list[list[str]]:
    """Return how each pair of GPUs is connected, in nvidia-smi's terms; "" if unknown."""
    buses = [_bus(gpu.first_available("nvmlDeviceGetPciInfo")) for gpu in gpus]
    ends = [_ends(gpu) for gpu in gpus]
    return [
        ["X" if a == b else _between(gpu, other, ends[a], buses[b]) for b, other in enumerate(gpus)]
        for a, gpu in enumerate(gpus)
    ]


def _between(gpu: NvmlQueries, other: NvmlQueries, ends: list[str], bus: str) -> str:
    if gpu.handle is None or other.handle is None:
        return ""
    if ends and gpu.first_available("nvmlDeviceGetP2PStatus", more=(other.handle, NVLINK)) == 0:
        # Links that end at no GPU end at an NVSwitch, which connects all of them.
        return f"NV{ends.count(bus) or len(ends)}"
    return LEVELS.get(gpu.first_available("nvmlDeviceGetTopologyCommonAncestor", more=(other.handle,)), "")


def _ends(gpu: NvmlQueries) -> list[str]:
    """Return the bus addresses at the far end of its active NVLinks."""
    up = [link for link, state in enumerate(links(gpu)) if state]
    return [_bus(gpu.first_available("nvmlDeviceGetNvLinkRemotePciInfo", more=(link,))) for link in up]


def _bus(pci: Any) -> str:
    return str(pci.busId) if pci else ""


def _parent(queries: NvmlQueries) -> str | None:
    """Return the UUID of the GPU that a slice is part of."""
    if not queries.first_available("nvmlDeviceIsMigDeviceHandle"):
        return None
    whole = NvmlQueries()
    whole.handle = queries.first_available("nvmlDeviceGetDeviceHandleFromMigDeviceHandle")
    uuid: str | None = whole.first_available("nvmlDeviceGetUUID")
    return uuid


def _slowdown(queries: NvmlQueries) -> int | None:
    """Return the slowdown temperature. Newer GPUs report only the margin to it."""
    temperature: int | None = queries.first_available("nvmlDeviceGetTemperatureThreshold", more=(SLOWDOWN,))
    if temperature is None:
        now = queries.first_available("nvmlDeviceGetTemperature", more=(GPU_SENSOR,))
        left = queries.first_available("nvmlDeviceGetMarginTemperature")
        margin = queries.fields(SLOWDOWN_MARGIN).get("margin")
        if now is not None and left is not None and margin is not None:
            return int(now + left - margin)
    return temperature


def _slice(queries: NvmlQueries, index: int) -> dict[str, Any]:
    mig_slice = NvmlQueries()
    mig_slice.handle = queries.first_available("nvmlDeviceGetMigDeviceHandleByIndex", more=(index,))
    size = memory(mig_slice)
    return without_missing(
        {
            "uuid": mig_slice.first_available("nvmlDeviceGetUUID"),
            "name": mig_slice.first_available("nvmlDeviceGetName"),
            "memory_mib": size.total // MIB if size else None,
            "gpu_instance": mig_slice.first_available("nvmlDeviceGetGpuInstanceId"),
            "compute_instance": mig_slice.first_available("nvmlDeviceGetComputeInstanceId"),
        }
    )
