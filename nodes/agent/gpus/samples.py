"""Collect a window's GPU samples, period by period, into the columns that are sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

COLUMNS = (
    *("gpu_percent", "sm_percent", "memory_mib", "temperature_c", "memory_temperature_c", "watts", "sm_mhz"),
    *("throttle", "nvlink_tx_mib", "nvlink_rx_mib", "pcie_tx_mib", "pcie_rx_mib"),
)
MAX_VALUE = 2**31 - 1


@dataclass
class SampleWindow:
    """GPU samples by period number (whole periods since 1970). The reader samples in the middle of a period."""

    period: float
    _by_slot: dict[int, dict[str, Mapping[str, int]]] = field(default_factory=dict)

    def add(self, wall: float, samples: Mapping[str, Mapping[str, int]]) -> None:
        """Add the samples of GPUs, by UUID, at one moment."""
        self._by_slot[int(wall // self.period)] = {uuid: dict(sample) for uuid, sample in samples.items()}

    def take(self, first: int, n: int) -> dict[str, Any]:
        """Return `gpus` and `columns` of `n` periods from `first` on; drop these and older ones."""
        window = [self._by_slot.get(slot, {}) for slot in range(first, first + n)]
        self._by_slot = {slot: sample for slot, sample in self._by_slot.items() if slot >= first + n}
        uuids = list(dict.fromkeys(uuid for samples in window for uuid in samples))
        columns = {name: [_column(name, uuid, window) for uuid in uuids] for name in COLUMNS}
        return {"gpus": uuids, "columns": columns if uuids else {}}

    def first_from(self, slot: int) -> int | None:
        """Return the first period from `slot` on that has a sample."""
        return min((other for other in self._by_slot if other >= slot), default=None)


def _column(name: str, uuid: str, window: Sequence[Mapping[str, Mapping[str, int]]]) -> list[int | None]:
    return [_value(samples[uuid].get(name)) if uuid in samples else None for samples in window]


def _value(value: object) -> int | None:
    return min(max(value, -MAX_VALUE), MAX_VALUE) if type(value) is int else None
