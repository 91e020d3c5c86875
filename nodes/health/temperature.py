"""Decide when a GPU is hot: one rule for the cluster map, node pages and post-mortems. Pure.

A GPU is hot if NVML says that it runs slower because of heat, or if it is within NEAR_SLOWDOWN_C of the temperature at
which it slows down. Without a reported slowdown temperature, DEFAULT_HOT_C applies.
"""

from __future__ import annotations

NEAR_SLOWDOWN_C = 3
DEFAULT_HOT_C = 86  # 3 °C below the slowdown temperature of an H100
THERMAL_THROTTLE = 0x20 | 0x40  # NVML's SwThermalSlowdown and HwThermalSlowdown


def hot_from_c(slowdown_c: int | None) -> int:
    """Return the temperature in °C from which a GPU is hot; `slowdown_c` is its slowdown temperature, if known."""
    return slowdown_c - NEAR_SLOWDOWN_C if slowdown_c else DEFAULT_HOT_C


def is_throttled(throttle: int) -> bool:
    """Return whether NVML's reason bits say that heat slows the GPU down."""
    return bool(throttle & THERMAL_THROTTLE)


def is_hot(temperature_c: float | None, slowdown_c: int | None, *, throttle: int = 0) -> bool:
    """Return whether a GPU is hot. An unknown temperature is not hot unless heat slows the GPU down."""
    return is_throttled(throttle) or (temperature_c is not None and temperature_c >= hot_from_c(slowdown_c))
