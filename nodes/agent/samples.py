"""A window's samples of GPUs, second by second, as the columns that are told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

COLUMNS = (
    *("gpu_percent", "sm_percent", "memory_mib", "temperature_c", "memory_temperature_c", "watts", "sm_mhz"),
    *("throttle", "nvlink_tx_mib", "nvlink_rx_mib", "pcie_tx_mib", "pcie_rx_mib"),
)
MOST_VALUE = 2**31 - 1


@dataclass
class Samples:
    """Looks by the whole periods since 1970 in which they were taken: the reader takes each in the middle of one."""

    period: float
    _looks: dict[int, dict[str, Mapping[str, int]]] = field(default_factory=dict)

    def add(self, wall: float, looks: Mapping[str, Mapping[str, int]]) -> None:
        """What GPUs, by UUID, did at a moment."""
        self._looks[int(wall // self.period)] = {uuid: dict(look) for uuid, look in looks.items()}

    def take(self, first: int, n: int) -> dict[str, Any]:
        """`gpus` and `columns` of the periods from `first` on; what is older goes with them."""
        mine = [self._looks.get(slot, {}) for slot in range(first, first + n)]
        self._looks = {slot: look for slot, look in self._looks.items() if slot >= first + n}
        uuids = list(dict.fromkeys(uuid for looks in mine for uuid in looks))
        columns = {name: [_column(name, uuid, mine) for uuid in uuids] for name in COLUMNS}
        return {"gpus": uuids, "columns": columns if uuids else {}}

    def first_from(self, slot: int) -> int | None:
        """The first period from this one on that has a look."""
        return min((one for one in self._looks if one >= slot), default=None)


def _column(name: str, uuid: str, looks: Sequence[Mapping[str, Mapping[str, int]]]) -> list[int | None]:
    return [_value(look[uuid].get(name)) if uuid in look else None for look in looks]


def _value(told: object) -> int | None:
    return min(max(told, -MOST_VALUE), MOST_VALUE) if type(told) is int else None
