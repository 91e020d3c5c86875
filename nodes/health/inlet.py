"""Estimate the temperature of the air that a GPU takes in, from its own temperature and power. No Django.

In a steady state a GPU is warmer than its inlet by its power times a thermal resistance: T_gpu = T_inlet + R · P, with
R in °C per watt (the usual one-resistor model of a heat sink). R is learnt from each GPU by pairs of steady levels just
before and after a change of load, while its inlet hardly changes: R = ΔT / ΔP. The median over a GPU's pairs, and over
all GPUs of its model, ignores disturbed ones. The inlet of a node is the median over its GPUs of T_gpu − R · P, that of
a rack the median over its nodes.

What stands between a node's front and its GPUs, such as the chassis or air that others have heated, adds an offset that
depends on the model. Where three nodes of a model or more also measure their inlet, the median difference takes it out.
Elsewhere estimates are compared only with those of the same model, of which the offset is the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

STEADY_W = 25.0
STEADY_C = 1.5
STEADY_S = 200.0
"""Two readings at most so far apart, with so little change, mean a steady state."""
MIN_JOINED, MAX_JOINED = 3, 8
"""How many steady readings are averaged: GPUs report whole degrees."""
MIN_RISE_W = 150.0
"""A pair of levels must differ by this much power."""
PAIR_S = 3_600.0
MAX_PAIRS = 15
MIN_PAIRS = 5
"""How many pairs of all GPUs of a model are needed before its resistance is known."""
PLAUSIBLE = (0.005, 0.3)  # °C per W
MIN_GPUS = 2
"""How many GPUs of a node must be steady, if it has so many, before its inlet is estimated."""
MIN_MEASURING = 3
"""How many nodes of a model must measure their inlet before its estimates are corrected: one BMC may be broken."""
MIN_SHARE = 0.5
"""The share of a rack's nodes that must be known before the rack is compared with others."""
NEIGHBOURS, MIN_NEIGHBOURS = 2, 2
"""Racks on either side with which a rack is compared, and how many of them must be known."""


@dataclass(frozen=True)
class ThermalReading:
    """A GPU's temperature and power at a moment (Unix seconds); `count`: a mean of so many readings."""

    at: float
    celsius: float
    watts: float
    count: int = 1

    def joined_by(self, other: ThermalReading) -> ThermalReading:
        """Return the mean with one more reading; older ones fade beyond MAX_JOINED."""
        count = min(self.count, MAX_JOINED - 1)
        celsius = (self.celsius * count + other.celsius) / (count + 1)
        watts = (self.watts * count + other.watts) / (count + 1)
        return ThermalReading(other.at, celsius, watts, self.count + 1)


@dataclass
class GpuThermals:
    """Remembers of one GPU its newest reading, the level of power it is at, the one before, and its pairs."""

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
        if self.level.count == MIN_JOINED and self.before is not None:  # once for each change of load
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
            return cls(last, level, before, payload[3] is True, [float(pair) for pair in payload[4]][-MAX_PAIRS:])
        except (OverflowError, TypeError, ValueError):
            return cls()

    @property
    def _readings(self) -> tuple[ThermalReading | None, ...]:
        return self.last, self.level, self.before

    def _pair(self, first: ThermalReading, second: ThermalReading) -> None:
        watts = second.watts - first.watts
        if abs(watts) < MIN_RISE_W or second.at - first.at > PAIR_S or first.count < MIN_JOINED:
            return
        resistance = (second.celsius - first.celsius) / watts
        if PLAUSIBLE[0] <= resistance <= PLAUSIBLE[1]:
            self.pairs = [*self.pairs, resistance][-MAX_PAIRS:]


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
    return {model: median(values) for model, values in by_model.items() if counts[model] >= MIN_PAIRS}


def node_inlet(gpus: Sequence[tuple[str, GpuThermals]], resistance: Mapping[str, float]) -> float | None:
    """Return the estimated inlet of a node in °C: the median over its steady GPUs; None if there are too few.

    A GPU with enough pairs has a resistance of its own: heat sinks of one model differ by some percent.
    """
    found = []
    for model, thermals in gpus:
        level = thermals.level
        if level is None or not thermals.is_steady or level.count < MIN_JOINED or model not in resistance:
            continue
        gpu_resistance = median(thermals.pairs) if len(thermals.pairs) >= MIN_PAIRS else resistance[model]
        found.append(level.celsius - gpu_resistance * level.watts)
    return median(found) if found and len(found) >= min(MIN_GPUS, len(gpus)) else None


@dataclass(frozen=True)
class NodeInlet:
    """A node's inlet in °C: measured by its BMC, estimated from its GPUs, or both. `model`: of most of its GPUs."""

    node: str
    measured_c: float | None = None
    estimated_c: float | None = None
    model: str = ""

    @property
    def may_be_known(self) -> bool:
        return self.model != "" or self.measured_c is not None


@dataclass(frozen=True)
class RackInlet:
    """A rack's inlet in °C, by so many nodes. `above_neighbours_c`: how much warmer it is than them; None: unknown."""

    rack: str
    inlet_c: float
    is_estimate: bool
    nodes: int
    above_neighbours_c: float | None = None


MEASURED = ""
"""The scale of measurements and corrected estimates. A model's estimates have another one, by its name, until then."""
Scales = Mapping[str, Sequence[float]]


def rack_inlets(racks: Sequence[tuple[str, Sequence[NodeInlet]]]) -> list[RackInlet]:
    """Return the inlets of racks that stand next to each other in this order; racks without any value are left out."""
    offsets = _offsets([node for _, nodes in racks for node in nodes])
    scales = [_scales(nodes, offsets) for _, nodes in racks]
    comparable = [_comparable(nodes, found) for (_, nodes), found in zip(racks, scales, strict=True)]
    inlets = []
    for place, (rack, nodes) in enumerate(racks):
        values = _shown(comparable[place]) or _shown(scales[place])
        if not values:
            continue
        neighbours = comparable[max(0, place - NEIGHBOURS) : place] + comparable[place + 1 : place + 1 + NEIGHBOURS]
        above = _above(comparable[place], neighbours)
        measured = sum(node.measured_c is not None for node in nodes)
        inlets.append(RackInlet(rack, round(median(values), 2), 2 * measured < len(values), len(values), above))
    return inlets


def _offsets(nodes: Iterable[NodeInlet]) -> dict[str, float]:
    """Return by model how much estimates exceed measurements, where enough nodes have both."""
    both: defaultdict[str, list[float]] = defaultdict(list)
    for node in nodes:
        if node.estimated_c is not None and node.measured_c is not None:
            both[node.model].append(node.estimated_c - node.measured_c)
    return {model: median(values) for model, values in both.items() if len(values) >= MIN_MEASURING}


def _scales(nodes: Iterable[NodeInlet], offsets: Mapping[str, float]) -> Scales:
    """Return the temperatures of a rack's nodes by the scale that they are on."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for node in nodes:
        if node.measured_c is not None:
            found[MEASURED].append(node.measured_c)
        elif node.estimated_c is not None and node.model in offsets:
            found[MEASURED].append(node.estimated_c - offsets[node.model])
        elif node.estimated_c is not None:
            found[node.model].append(node.estimated_c)
    return found


def _comparable(nodes: Sequence[NodeInlet], scales: Scales) -> Scales:
    """Return the scales on which enough nodes of the rack are: one node is no rack."""
    total = sum(node.may_be_known for node in nodes)
    models = Counter(node.model for node in nodes)
    return {
        scale: values
        for scale, values in scales.items()
        if len(values) >= MIN_SHARE * (total if scale == MEASURED else models[scale])
    }


def _shown(scales: Scales) -> Sequence[float]:
    """Return the measured and corrected temperatures; all estimates without any."""
    return scales.get(MEASURED) or [celsius for values in scales.values() for celsius in values]


def _above(rack: Scales, neighbours: Sequence[Scales]) -> float | None:
    """Return the median over the rack's nodes of how much warmer its nodes on that scale are than the neighbours'."""
    above: list[float] = []
    for scale, values in rack.items():
        others = [median(other[scale]) for other in neighbours if scale in other]
        if len(others) >= MIN_NEIGHBOURS:
            above += [median(values) - median(others)] * len(values)
    return round(median(above), 2) if above else None
