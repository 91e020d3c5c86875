"""Estimate the temperature of the air that a GPU takes in, from its own temperature and power. No Django.

In a steady state a GPU is warmer than its inlet by its power times a thermal resistance: T_gpu = T_inlet + R · P, with
R in °C per watt (the usual one-resistor model of a heat sink). R is learnt from each GPU by pairs of steady levels just
before and after a change of load, while its inlet hardly changes: R = ΔT / ΔP. The median over a GPU's pairs, and over
all GPUs of its model, ignores disturbed ones. The inlet of a node is the median over its GPUs of T_gpu − R · P, that of
a rack the median over its nodes. Where nodes of a rack measure their inlet, estimates are shifted by the median
difference, which takes out what stands between a node's front and its GPUs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

STEADY_W = 25.0
STEADY_C = 1.5
STEADY_S = 200.0
"""Two readings at most so far apart, with so little change, mean a steady state."""
LEAST_JOINED, MOST_JOINED = 3, 8
"""Steady readings that are averaged: GPUs report whole degrees."""
LEAST_RISE_W = 150.0
"""A pair of levels must differ by this much power."""
PAIR_S = 3_600.0
MOST_PAIRS = 15
LEAST_PAIRS = 5
"""Pairs of all GPUs of a model before its resistance is known."""
PLAUSIBLE = (0.005, 0.3)  # °C per W
NEIGHBOURS = 2
"""Racks on either side with which a rack is compared."""


@dataclass(frozen=True)
class ThermalReading:
    """A GPU's temperature and power at a moment (Unix seconds); `count`: a mean of so many readings."""

    at: float
    celsius: float
    watts: float
    count: int = 1

    def joined_by(self, other: ThermalReading) -> ThermalReading:
        """Return the mean with one more reading; older ones fade beyond MOST_JOINED."""
        count = min(self.count, MOST_JOINED - 1)
        celsius = (self.celsius * count + other.celsius) / (count + 1)
        watts = (self.watts * count + other.watts) / (count + 1)
        return ThermalReading(other.at, celsius, watts, self.count + 1)


@dataclass
class GpuThermals:
    """What is learnt about one GPU: its newest reading, the level of power it is at, the one before, and its pairs."""

    last: ThermalReading | None = None
    level: ThermalReading | None = None
    before: ThermalReading | None = None
    is_steady: bool = False
    pairs: list[float] = field(default_factory=list)

    def observe(self, reading: ThermalReading) -> None:
        """Note a reading; readings come about once a minute."""
        previous, self.last = self.last, reading
        self.is_steady = (
            previous is not None
            and 0 < reading.at - previous.at <= STEADY_S
            and abs(reading.watts - previous.watts) <= STEADY_W
            and abs(reading.celsius - previous.celsius) <= STEADY_C
        )
        if not self.is_steady:
            return
        level = self.level
        if level is None or abs(reading.watts - level.watts) > 2 * STEADY_W or reading.at - level.at > PAIR_S:
            self.level, self.before = reading, level
            return
        self.level = level.joined_by(reading)
        if self.level.count == LEAST_JOINED and self.before is not None:  # once for each change of load
            self._pair(self.before, self.level)

    def as_payload(self) -> list[Any]:
        """Return JSON values."""
        readings = [[r.at, round(r.celsius, 2), round(r.watts, 1), r.count] if r else None for r in self._readings]
        return [*readings, self.is_steady, [round(pair, 6) for pair in self.pairs]]

    @classmethod
    def from_payload(cls, payload: object) -> GpuThermals:
        """Return what `as_payload` returned; nothing known if it is anything else."""
        if not isinstance(payload, list) or len(payload) != 5:
            return cls()
        try:
            last, level, before = (_stored_reading(values) if values else None for values in payload[:3])
            return cls(last, level, before, payload[3] is True, [float(pair) for pair in payload[4]][-MOST_PAIRS:])
        except (OverflowError, TypeError, ValueError):
            return cls()

    @property
    def _readings(self) -> tuple[ThermalReading | None, ...]:
        return self.last, self.level, self.before

    def _pair(self, first: ThermalReading, second: ThermalReading) -> None:
        watts = second.watts - first.watts
        if abs(watts) < LEAST_RISE_W or second.at - first.at > PAIR_S or first.count < LEAST_JOINED:
            return
        resistance = (second.celsius - first.celsius) / watts
        if PLAUSIBLE[0] <= resistance <= PLAUSIBLE[1]:
            self.pairs = [*self.pairs, resistance][-MOST_PAIRS:]


def _stored_reading(values: Any) -> ThermalReading:
    at, celsius, watts, count = values
    return ThermalReading(float(at), float(celsius), float(watts), int(count))


def resistances(gpus: Iterable[tuple[str, GpuThermals]]) -> dict[str, float]:
    """Return °C per watt by GPU model: the median over its GPUs of their medians."""
    by_model: defaultdict[str, list[float]] = defaultdict(list)
    counts: defaultdict[str, int] = defaultdict(int)
    for model, thermals in gpus:
        if thermals.pairs:
            by_model[model].append(median(thermals.pairs))
            counts[model] += len(thermals.pairs)
    return {model: median(values) for model, values in by_model.items() if counts[model] >= LEAST_PAIRS}


def node_inlet(gpus: Iterable[tuple[str, GpuThermals]], resistance: Mapping[str, float]) -> float | None:
    """Return the estimated inlet of a node in °C: the median over its steady GPUs; None if there are none.

    A GPU with enough pairs has a resistance of its own: heat sinks of one model differ by some percent.
    """
    found = []
    for model, thermals in gpus:
        level = thermals.level
        if level is None or not thermals.is_steady or level.count < LEAST_JOINED or model not in resistance:
            continue
        gpu_resistance = median(thermals.pairs) if len(thermals.pairs) >= LEAST_PAIRS else resistance[model]
        found.append(level.celsius - gpu_resistance * level.watts)
    return median(found) if found else None


@dataclass(frozen=True)
class NodeInlet:
    """A node's inlet in °C: measured by its BMC, estimated from its GPUs, or both."""

    node: str
    measured_c: float | None = None
    estimated_c: float | None = None


@dataclass(frozen=True)
class RackInlet:
    """A rack's inlet in °C. `above_neighbours_c`: how much warmer than the racks next to it; None: unknown."""

    rack: str
    inlet_c: float
    is_estimate: bool
    nodes: int
    above_neighbours_c: float | None = None


def rack_inlets(racks: Sequence[tuple[str, Sequence[NodeInlet]]]) -> list[RackInlet]:
    """Return the inlets of racks that stand next to each other in this order; racks without any value are left out."""
    offset = _offset([node for _, nodes in racks for node in nodes])
    found = [inlet for rack, nodes in racks if (inlet := _rack(rack, nodes, offset)) is not None]
    compared = []
    for place, inlet in enumerate(found):
        neighbours = found[max(0, place - NEIGHBOURS) : place] + found[place + 1 : place + 1 + NEIGHBOURS]
        # An estimate and a measurement may differ by an offset that is no heat.
        same = [other.inlet_c for other in neighbours if other.is_estimate == inlet.is_estimate or offset is not None]
        above = round(inlet.inlet_c - median(same), 2) if len(same) >= 2 else None
        compared.append(RackInlet(inlet.rack, inlet.inlet_c, inlet.is_estimate, inlet.nodes, above))
    return compared


def _offset(nodes: Iterable[NodeInlet]) -> float | None:
    """Return by how much estimates exceed measurements, where a node has both."""
    both = [
        node.estimated_c - node.measured_c
        for node in nodes
        if node.estimated_c is not None and node.measured_c is not None
    ]
    return median(both) if both else None


def _rack(rack: str, nodes: Sequence[NodeInlet], offset: float | None) -> RackInlet | None:
    measured = [node.measured_c for node in nodes if node.measured_c is not None]
    if measured:
        return RackInlet(rack, round(median(measured), 2), False, len(measured))
    estimated = [node.estimated_c - (offset or 0.0) for node in nodes if node.estimated_c is not None]
    return RackInlet(rack, round(median(estimated), 2), True, len(estimated)) if estimated else None
