"""Present what a health rule observed: fields of a signal in words, with their units. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gpus.health import RECOVERY_ACTIONS
from nodes.presenting.counters import CLOCK_REASONS
from vigil_core import formatting
from vigil_core.formatting import NBSP

_UNITS = {"_c": "°C", "_mib": "MiB", "_percent": "%"}
_NUMBERS = {
    "failures": ("failure", "failures"),
    "expected": ("expected", "expected"),
    "programs": ("program", "programs"),
    "owners": ("owner", "owners"),
    "slow_programs": ("of them slower", "of them slower"),
    "jobs": ("job", "jobs"),
    "nodes": ("node", "nodes"),
    "other_nodes": ("other node", "other nodes"),
    "agents": ("agent", "agents"),
    "silent": ("of them silent", "of them silent"),
    "processes": ("process", "processes"),
    "blocked_processes": ("blocked process", "blocked processes"),
    "found": ("GPU found", "GPUs found"),
    "missing": ("GPU missing", "GPUs missing"),
    "nvlinks_down": ("NVLink down", "NVLinks down"),
    "ecc_corrected": ("corrected memory error", "corrected memory errors"),
    "ecc_uncorrected": ("uncorrectable memory error", "uncorrectable memory errors"),
    "ecc_corrected_to_peers": ("× the corrected memory errors of its peers",) * 2,
    "remapped_pending": ("memory row to be remapped", "memory rows to be remapped"),
    "remapped_failed": ("memory row that could not be remapped", "memory rows that could not be remapped"),
    "remapped_uncorrected": ("row remapped after uncorrectable errors", "rows remapped after uncorrectable errors"),
    "below_minimum": ("version below a minimum", "versions below a minimum"),
    "ratio": ("× the step time of other nodes",) * 2,
}
"""What follows a number, in the singular and the plural."""
_SHARES = {
    "root_free_share": "of / free",
    "shm_free_share": "of /dev/shm free",
    "affected_share": "of nodes affected",
    "silent_share": "of all agents silent",
    "slow_share": "of programs slower",
    "share_of_one_node": "on one node",
    "pcie_width_to_peers": "of the PCIe lanes of its peers",
    "pcie_generation_to_peers": "of the PCIe generation of its peers",
    "power_cap_to_peers": "of the power limit of its peers",
}
"""What follows a fraction in per cent."""
_CHANCES = ("chance", "programs_chance")
_SMALLEST_CHANCE = 1e-9
_MOST_REASONS = 2


def observed_text(fields: Mapping[str, object], wanted: Collection[str] | None = None) -> str:
    """Return the wanted fields, or all, such as "margin 2 °C, 2 NVLinks down"; a rule's title says what is true."""
    shown = (_field(name, value) for name, value in fields.items() if wanted is None or name in wanted)
    return ", ".join(text for text in shown if text)


def _field(name: str, value: object) -> str:
    """Return one field; "" for yes and no, and for what is not reported."""
    if isinstance(value, bool) or value is None or value == "":
        return ""
    if not isinstance(value, int | float):
        return f"{_words(name)} {value}"
    if name in _NUMBERS:
        return f"{formatting.measure(value)}{NBSP}{_NUMBERS[name][value != 1]}"
    if name in _SHARES:
        percent = f"{round(value * 100)}{NBSP}%" if 0.1 <= value < 100 else formatting.percent(value)
        return f"{percent} {_SHARES[name]}"
    if name == "root_free_mib":
        return f"{formatting.memory(value * 2**20)} free on /"
    if name == "recovery_action":
        return RECOVERY_ACTIONS.get(int(value), "") if value else ""
    if name == "sram_threshold_exceeded":
        return "SRAM errors above NVIDIA’s threshold" if value else ""
    if name == "throttle":
        return _throttle(int(value))
    if name == "watts":
        return f"{formatting.measure(value)}{NBSP}W"
    if name == "clock_offset_s":  # it may be negative
        return f"clock offset {formatting.measure(value)}{NBSP}s"
    if name in _CHANCES:
        return f"by chance 1 time in {formatting.count(round(1 / max(value, _SMALLEST_CHANCE)))}"
    if name.endswith("_s"):
        return f"{_words(name.removesuffix('_s'))} {formatting.duration(value)}"
    for suffix, unit in _UNITS.items():
        if name.endswith(suffix):
            return f"{_words(name.removesuffix(suffix))} {formatting.measure(value)}{NBSP}{unit}"
    return f"{_words(name)} {formatting.measure(value)}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _throttle(bits: int) -> str:
    reasons = [words for bit, words, _ in CLOCK_REASONS if bits & bit][:_MOST_REASONS]
    return f"clocks lowered by {formatting.listed(reasons)}" if reasons else "clocks not lowered"
