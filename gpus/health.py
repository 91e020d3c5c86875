"""Judge a GPU by its slow counters: one list of rules for the agent's `check`, for pages, metrics and notifications.

A rule fires on a state that a reset, a reboot or a replacement has to end, never on one that ends by itself. Sources:
NVIDIA's "GPU Memory Error Management" (row remapping) and "GPU Debug Guidelines" (recovery action, NVML field 230);
DCGM's health watch for memory and Meta's gcm, which both fail a GPU on its first uncorrectable error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

RECOVERY_ACTIONS = {
    1: "asks to be reset",
    2: "asks for a reboot of the node",
    3: "asks that what it shares with other GPUs is drained",
    4: "asks to be drained and reset",
    5: "asks for a recovery of IMEX",
    6: "asks for a reset of its bus",
    7: "asks for a reboot of the system",
}
"""NVML's nvmlDeviceGpuRecoveryAction_t, less 0 (none)."""


def faults(counters: Mapping[str, Any]) -> list[str]:
    """Return what is broken about a GPU, the worst first; an empty list means that it can take jobs.

    `counters` are named as in `gpus.told.Counters`; they may come from another machine, so wrong types count as 0.
    Each text completes a sentence that begins with the GPU's name: "GPU 3 could not remap a row of its memory".
    """
    return list(_faults(counters))


def _faults(counters: Mapping[str, Any]) -> Iterator[str]:
    if _number(counters, "remapped_failed"):
        yield "could not remap a row of its memory and has to be replaced"
    if _number(counters, "sram_threshold_exceeded"):
        yield "has had more SRAM errors than its maker allows and has to be replaced"
    if action := _number(counters, "recovery_action"):
        yield RECOVERY_ACTIONS.get(action, "asks for a repair")
    if errors := _number(counters, "ecc_uncorrected"):
        yield f"has had {errors:,} uncorrectable memory error{'s' if errors > 1 else ''} and needs a reset"


def _number(counters: Mapping[str, Any], name: str) -> int:
    value = counters.get(name)
    return int(value) if isinstance(value, int | float) and 0 < value < 2**63 else 0
