"""Compute the fields of a GPU that rules read: its newest samples, and its counters next to those of its peers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nodes.health.rules.condition import FieldValue
from nodes.models import Gpu
from nodes.monitoring import peers
from nodes.monitoring.reported import number
from vigil_core import untrusted

WORKING_PERCENT = 50
_COPIED = (
    "ecc_uncorrected", "ecc_corrected", "sram_threshold_exceeded", "remapped_pending", "remapped_failed",
    "remapped_uncorrected", "recovery_action",
)  # fmt: skip


def sample_fields(gpu: Gpu, newest: Mapping[str, Any]) -> dict[str, FieldValue]:
    """Return what the GPU's newest samples say, with how far it is from the temperature that slows it down."""
    temperature = number(newest, "temperature_c")
    limit = gpu.slowdown_c
    return {
        "temperature_c": temperature,
        "margin_c": None if temperature is None or not limit else limit - temperature,
        "throttle": untrusted.count(newest.get("throttle")),
        "gpu_percent": number(newest, "gpu_percent"),
        "watts": number(newest, "watts"),
    }


def counter_fields(
    counters: Mapping[int, Mapping[str, Any]], samples: Mapping[int, Mapping[str, Any]]
) -> dict[int, dict[str, FieldValue]]:
    """Return the counters of a node's GPUs with their ratios to the other GPUs."""
    working = {pk for pk, values in samples.items() if (number(values, "gpu_percent") or 0) >= WORKING_PERCENT}
    ratios = {
        "ecc_corrected_to_peers": peers.ratios(_column(counters, "ecc_corrected"), least=1.0),
        "pcie_width_to_peers": peers.ratios(_column(counters, "pcie_width")),
        "power_cap_to_peers": peers.ratios(_column(counters, "power_cap_watts")),
        # A GPU lowers its PCIe generation while it idles.
        "pcie_generation_to_peers": peers.ratios(
            {pk: value for pk, value in _column(counters, "pcie_generation").items() if pk in working}
        ),
    }
    found: dict[int, dict[str, FieldValue]] = {}
    for pk, values in counters.items():
        links = values.get("nvlinks")
        found[pk] = {name: number(values, name) for name in _COPIED}
        found[pk]["nvlinks_down"] = sum(link == 0 for link in links) if isinstance(links, list) and links else None
        found[pk] |= {name: by_gpu.get(pk) for name, by_gpu in ratios.items()}
    return found


def _column(counters: Mapping[int, Mapping[str, Any]], name: str) -> dict[int, float | None]:
    return {pk: number(values, name) for pk, values in counters.items()}
