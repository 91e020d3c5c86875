"""Name the four measurements that pages show of a GPU, with their units."""

from __future__ import annotations

import math
from dataclasses import dataclass

from vigil_core import formatting

GIB_PER_MIB = 1 / 1024


@dataclass(frozen=True)
class GpuField:
    """A measurement. `factor` turns a value as reported into one in `unit`."""

    name: str
    title: str
    unit: str
    factor: float = 1.0
    digits: int = 0

    def number(self, reported: float | None) -> str:
        """Return a value as reported in the field's unit, which is left out."""
        return self._number(None if reported is None else reported * self.factor)

    def text(self, value: float | None) -> str:
        """Return a value, which is in the field's unit, with that unit."""
        number = self._number(value)
        return number if number == formatting.MISSING else f"{number}{formatting.NBSP}{self.unit}"

    def _number(self, value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return formatting.MISSING
        return f"{value:.{self.digits}f}" if self.digits else formatting.count(round(value))


FIELDS = (
    GpuField("gpu_percent", "Utilisation", "%"),
    GpuField("memory_mib", "Memory", "GiB", GIB_PER_MIB, 1),
    GpuField("temperature_c", "Temperature", "°C"),
    GpuField("watts", "Power", "W"),
)
BY_NAME = {field.name: field for field in FIELDS}
