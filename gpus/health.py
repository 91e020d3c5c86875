"""Judge a GPU by its slow counters alone: for the agent's `check`, and for the marks and sentences of GPUs on pages.

What is done about a GPU is decided by the health rules, which know its history, too: nodes/health/catalogue/gpu.toml
has rules for the same states, and `driver-wants-reset` of xid.toml. Agents cannot read those; keep both in step.

A rule here fires on a state that only a reset, a reboot or a replacement ends. Sources: NVIDIA's "GPU Memory Error
Management" (row remapping) and "GPU Debug Guidelines" (recovery action, NVML field 230); DCGM's health watch for memory
and Meta's gcm, which both fail a GPU on its first uncorrectable error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

RECOVERY_ACTIONS = {
    1: "needs a reset",
    2: "needs a reboot of the node",
    3: "needs a drain of what it shares with other GPUs (peer-to-peer)",
    4: "needs to be drained and reset",
    5: "needs an IMEX recovery",
    6: "needs a bus reset",
    7: "needs a reboot of the system",
}
"""NVML's nvmlDeviceGpuRecoveryAction_t without 0 (none)."""


def faults(counters: Mapping[str, Any]) -> list[str]:
    """Return what is broken about a GPU, the worst first; an empty list means that jobs can use it.

    `counters` are named as in `gpus.reports.GpuCounters`; they may come from another machine, so wrong types count as
    0. Each text completes a sentence that begins with the GPU's name: "GPU 3 failed to remap a row of its memory".
    """
    return list(_faults(counters))


def _faults(counters: Mapping[str, Any]) -> Iterator[str]:
    if _number(counters, "remapped_failed"):
        yield "failed to remap a memory row and must be replaced"
    if _number(counters, "sram_threshold_exceeded"):
        yield "has exceeded NVIDIA's SRAM error threshold and must be replaced"
    if action := _number(counters, "recovery_action"):
        yield RECOVERY_ACTIONS.get(action, "needs repair")
    if errors := _number(counters, "ecc_uncorrected"):
        yield f"has had {errors:,} uncorrectable memory error{'s' if errors > 1 else ''} and needs a reset"


def _number(counters: Mapping[str, Any], name: str) -> int:
    value = counters.get(name)
    return int(value) if isinstance(value, int | float) and 0 < value < 2**63 else 0
