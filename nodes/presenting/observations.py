"""Present what a health rule observed: fields of a signal in words, with their units. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from nodes.presenting.counters import CLOCK_REASONS
from vigil_core import formatting

NBSP = formatting.NBSP
_UNITS = {"_c": "°C", "_mib": "MiB", "_percent": "%"}
_CHANCES = ("chance", "programs_chance")
_SMALLEST_CHANCE = 1e-9
_MOST_REASONS = 2


def observed_text(fields: Mapping[str, object], wanted: Collection[str] | None = None) -> str:
    """Return the wanted fields, or all, such as "margin 2 °C, silent 10 min"; a rule's title says what is true."""
    shown = (_field(name, value) for name, value in fields.items() if wanted is None or name in wanted)
    return ", ".join(text for text in shown if text)


def _field(name: str, value: object) -> str:
    """Return one field; "" for yes and no, and for what is not reported."""
    if isinstance(value, bool) or value is None or value == "":
        return ""
    if not isinstance(value, int | float):
        return f"{_words(name)} {value}"
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
    if name.endswith("_share"):
        return f"{_words(name.removesuffix('_share'))} {formatting.percent(value)}"
    for suffix, unit in _UNITS.items():
        if name.endswith(suffix):
            return f"{_words(name.removesuffix(suffix))} {formatting.measure(value)}{NBSP}{unit}"
    return f"{_words(name)} {formatting.measure(value)}"


def _words(name: str) -> str:
    return name.replace("_", " ")


def _throttle(bits: int) -> str:
    reasons = [words for bit, words, _ in CLOCK_REASONS if bits & bit][:_MOST_REASONS]
    return f"clocks lowered by {formatting.listed(reasons)}" if reasons else "clocks not lowered"
