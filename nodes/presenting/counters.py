"""Present the slow counters of a node's GPUs: memory errors, remapped rows, links, clocks. Pure.

A cell is marked if it needs attention; GPUs with marked cells come first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpus.health import RECOVERY_ACTIONS
from nodes.health import temperature
from vigil_core import formatting, untrusted
from vigil_core.formatting import NBSP

CLOCK_REASONS: Sequence[tuple[int, str, bool]] = (
    (0x80, "power brake: the machine’s power supply demands it", True),
    (0x40, "heat (hardware)", True),
    (0x20, "heat (driver)", True),
    (0x08, "hardware slowdown", True),
    (0x04, "power limit reached", False),
    (0x10, "sync boost group", False),
    (0x02, "clocks set by an administrator", False),
    (0x100, "display clocks", False),
    (0x01, "idle", False),
)
"""NVML's nvmlClocksEventReasons, the most serious first: bit, words, whether it needs attention."""


@dataclass(frozen=True)
class CounterCell:
    """A value in words. `tone`: "failed" or "warn" if it needs attention."""

    text: str
    tone: str = ""


@dataclass(frozen=True)
class GpuCounterRow:
    """The counters of one GPU. `index` is NVML's."""

    index: int
    memory_errors: CounterCell
    lifetime_errors: CounterCell
    remapped: CounterCell
    links: CounterCell
    pcie: CounterCell
    clocks: CounterCell
    power_limit: CounterCell
    recovery: str
    """What the driver asks for; "" for nothing."""

    @property
    def urgency(self) -> int:
        cells = (self.memory_errors, self.remapped, self.links, self.pcie, self.clocks)
        return max((_URGENCY[cell.tone] for cell in cells), default=0) if not self.recovery else _URGENCY["failed"]


_URGENCY = {"": 0, "warn": 1, "failed": 2}
UNKNOWN = CounterCell(formatting.MISSING)


def counter_row(
    index: int, counters: Mapping[str, Any], *, throttle: int | None, is_busy: bool, maximum_watts: int | None = None
) -> GpuCounterRow:
    """Return the row of a GPU. `throttle`: NVML's clock event reasons; None if they are unknown or hidden.

    A GPU lowers its PCIe generation while it idles, so that counts only if it `is_busy`. The agent reports the one at
    which the GPU last worked, or the present one if it has not worked yet.
    """
    action = untrusted.count(counters.get("recovery_action")) or 0
    return GpuCounterRow(
        index,
        _memory_errors(counters, ""),
        _memory_errors(counters, "_lifetime"),
        _remapped(counters),
        _links(counters.get("nvlinks")),
        _pcie(counters, is_busy=is_busy),
        _clocks(throttle),
        _power_limit(counters, maximum_watts),
        RECOVERY_ACTIONS.get(action, "needs repair") if action else "",
    )


def sorted_rows(rows: Sequence[GpuCounterRow]) -> list[GpuCounterRow]:
    """Return what needs attention first, then by index."""
    return sorted(rows, key=lambda row: (-row.urgency, row.index))


def attention_text(rows: Sequence[GpuCounterRow], lost: Sequence[int] = ()) -> str:
    """Return which GPUs need attention, in one sentence; `lost` are the indices of those without a row."""
    indices = sorted([*(row.index for row in rows if row.urgency), *lost])
    if not indices:
        return "no GPU needs attention"
    names = [f"{index} (lost)" if index in lost else str(index) for index in indices]
    return (
        f"GPU{'s' if len(names) > 1 else ''} {formatting.listed(names)} need{'s' if len(names) == 1 else ''} attention"
    )


def _memory_errors(counters: Mapping[str, Any], suffix: str) -> CounterCell:
    corrected, uncorrected = (
        untrusted.count(counters.get(f"{name}{suffix}")) for name in ("ecc_corrected", "ecc_uncorrected")
    )
    if corrected is None and uncorrected is None:
        return UNKNOWN
    if not corrected and not uncorrected:
        return CounterCell("none")
    parts = [f"{formatting.count(uncorrected)}{NBSP}uncorrectable"] if uncorrected else []
    parts += [f"{formatting.count(corrected)}{NBSP}corrected"] if corrected else []
    return CounterCell(", ".join(parts), "failed" if uncorrected and not suffix else "")


def _remapped(counters: Mapping[str, Any]) -> CounterCell:
    """Return remapped memory rows, or the retired pages of GPUs before Ampere."""
    names = ("remapped_corrected", "remapped_uncorrected", "remapped_pending", "remapped_failed")
    corrected, uncorrected, pending, failed = (untrusted.count(counters.get(name)) for name in names)
    retired = [untrusted.count(counters.get(name)) for name in ("retired_corrected", "retired_uncorrected")]
    if failed:
        return CounterCell("a row could not be remapped", "failed")
    if pending:
        return CounterCell("a row waits for a reset", "warn")
    if counters.get("sram_threshold_exceeded"):
        return CounterCell("SRAM error threshold exceeded", "failed")
    if uncorrected is None and corrected is None:
        pages = sum(count or 0 for count in retired)
        return CounterCell(formatting.plural(pages, "retired page") if pages else "none") if any(
            count is not None for count in retired
        ) else UNKNOWN  # fmt: skip
    rows = (corrected or 0) + (uncorrected or 0)
    return CounterCell(formatting.plural(rows, "row") if rows else "none")


def _links(states: object) -> CounterCell:
    if not isinstance(states, list) or not states:
        return UNKNOWN
    down = sum(state == 0 for state in states)
    if down:
        return CounterCell(f"{formatting.count(down)} of {formatting.count(len(states))} down", "failed")
    return CounterCell(f"{formatting.count(len(states))} up")


def _pcie(counters: Mapping[str, Any], *, is_busy: bool) -> CounterCell:
    width, most_width = (untrusted.count(counters.get(name), 1024) for name in ("pcie_width", "pcie_width_most"))
    speed, most_speed = (
        untrusted.count(counters.get(name), 1024) for name in ("pcie_generation", "pcie_generation_most")
    )
    if not width:
        return UNKNOWN
    text = f"×{width}" if not speed else f"generation{NBSP}{speed} ×{width}"
    is_narrow = bool(most_width and width < most_width)
    is_slow = bool(speed and most_speed and speed < most_speed)
    if is_narrow or is_slow:
        text += f" of {most_speed or formatting.MISSING} ×{most_width or formatting.MISSING}"
    if is_slow and not is_narrow and not is_busy:
        text += ", idle now"
    return CounterCell(text, "failed" if is_narrow else "warn" if is_slow and is_busy else "")


def _clocks(throttle: int | None) -> CounterCell:
    if throttle is None:
        return UNKNOWN
    active = [(words, is_serious) for bit, words, is_serious in CLOCK_REASONS if throttle & bit]
    if not active:
        return CounterCell("full speed")
    is_hot = temperature.is_throttled(throttle)
    tone = "warn" if is_hot or any(is_serious for _, is_serious in active) else ""
    return CounterCell(", ".join(words for words, _ in active[:2]), tone)


def _power_limit(counters: Mapping[str, Any], maximum: int | None) -> CounterCell:
    watts = untrusted.count(counters.get("power_cap_watts"), 100_000) or maximum
    return CounterCell(f"{formatting.count(watts)}{NBSP}W") if watts else UNKNOWN
