"""Decode the newest GPU values of many machines at once (`Agent.newest`, as written by intake)."""

from __future__ import annotations

import msgspec


class NewestValues(msgspec.Struct, gc=False):
    """A GPU's newest values; None if not reported."""

    gpu_percent: int | None = None
    memory_mib: int | None = None
    temperature_c: int | None = None
    watts: int | None = None
    throttle: int = 0
    quiet_since: float | None = None  # Unix seconds: since when it has been idle


NO_VALUES = NewestValues()


class _NewestOfMachine(msgspec.Struct, gc=False):
    gpus: dict[str, NewestValues] = {}


_decoder = msgspec.json.Decoder(_NewestOfMachine)


def newest_of(text: str) -> dict[str, NewestValues]:
    """Decode the column's text; return the values by UUID."""
    return _decoder.decode(text).gpus
