"""Score estimates of rack inlets on simulated clusters whose inlet temperatures are known.

    python -m bench.thermal [--clusters 20] [--seed 1]

Bars: 95 % of the estimates within 1 °C after half a day, and every rack that is 3 °C too warm named, no other. Each
cluster has 8 racks of 4 nodes with 8 GPUs of two models, read once a minute for 24 hours. Inlets are 18 to 28 °C, swing
by 2 °C over the day and differ from rack to rack by less than 1 °C; one rack of every other cluster is 3 °C warmer for
the last six hours. GPUs have thermal resistances that vary by 5 % within a model, follow their power with a time
constant of 40 s, and report whole degrees with noise of 0.3 °C; jobs change a node's load every 10 to 180 minutes.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, field
from random import Random

from nodes.health.inlet import (
    GpuThermals,
    NodeInlet,
    RackInlet,
    ThermalReading,
    node_inlet,
    rack_inlets,
    resistances,
)
from nodes.health.rules.catalogue import shipped_rules

RACKS, NODES, GPUS, MINUTES = 8, 4, 8, 24 * 60
WARM_C, WARM_MINUTES, LEARNING_MINUTES = 3.0, 360, 720
MODELS = {"A": 0.055, "B": 0.04}  # °C per W
WITHIN_C, BAR = 1.0, 0.95


@dataclass
class SimulatedGpu:
    model: str
    resistance: float
    rise_c: float = 0.0
    thermals: GpuThermals = field(default_factory=GpuThermals)

    def pass_minute(self, random: Random, at: float, inlet_c: float, watts: float) -> None:
        self.rise_c += (self.resistance * watts - self.rise_c) * (1 - math.exp(-60 / 40))
        celsius = round(inlet_c + self.rise_c + random.gauss(0, 0.3))
        self.thermals.observe(ThermalReading(at, celsius, watts + random.gauss(0, 4)))


@dataclass
class SimulatedNode:
    gpus: list[SimulatedGpu]
    watts: float = 80.0
    until: int = 0

    def pass_minute(self, random: Random, minute: int, inlet_c: float) -> None:
        if minute >= self.until:
            self.watts = random.choice((80.0, random.uniform(250, 690)))
            self.until = minute + random.randrange(10, 180)
        for gpu in self.gpus:
            gpu.pass_minute(random, minute * 60.0, inlet_c, self.watts)


@dataclass(frozen=True)
class ThermalScore:
    """Absolute errors of estimates in °C, and how many warm racks were named, missed and named wrongly."""

    errors: list[float]
    named: int = 0
    missed: int = 0
    wrong: int = 0

    @property
    def within(self) -> float:
        return sum(error <= WITHIN_C for error in self.errors) / len(self.errors)


def run(random: Random, minutes: int = MINUTES) -> ThermalScore:
    """Simulate one cluster."""
    racks = [
        [
            SimulatedNode([SimulatedGpu(model, MODELS[model] * random.gauss(1, 0.05)) for _ in range(GPUS)])
            for model in (random.choice("AB") for _ in range(NODES))
        ]
        for _ in range(RACKS)
    ]
    base, warm = random.uniform(18, 26), random.randrange(RACKS) if random.random() < 0.5 else -1
    offsets = [random.uniform(-0.4, 0.4) for _ in racks]
    rule = shipped_rules()["rack-warm"].triggers[0]
    errors: list[float] = []
    since: dict[int, int] = {}
    named: set[int] = set()
    for minute in range(minutes):
        inlets = [base + 2 * math.sin(2 * math.pi * minute / 1440) + offset for offset in offsets]
        if minute >= minutes - WARM_MINUTES and warm >= 0:
            inlets[warm] += WARM_C
        for nodes, inlet in zip(racks, inlets, strict=True):
            for node in nodes:
                node.pass_minute(random, minute, inlet)
        if minute < LEARNING_MINUTES or minute % 5:
            continue
        found = _estimate(racks)
        errors += [abs(found[place].inlet_c - inlets[place]) for place in found]
        for place in range(RACKS):
            above = found[place].above_neighbours_c if place in found else None
            if rule.matches("rack_inlet", {"above_neighbours_c": above}):
                if minute - since.setdefault(place, minute) >= rule.for_s / 60:
                    named.add(place)
            else:
                since.pop(place, None)
    true = {warm} - {-1}
    return ThermalScore(errors, len(named & true), len(true - named), len(named - true))


def _estimate(racks: list[list[SimulatedNode]]) -> dict[int, RackInlet]:
    resistance = resistances((gpu.model, gpu.thermals) for nodes in racks for node in nodes for gpu in node.gpus)
    rows = [
        (
            str(place),
            [
                NodeInlet(
                    f"n{number}",
                    None,
                    node_inlet([(gpu.model, gpu.thermals) for gpu in node.gpus], resistance),
                    node.gpus[0].model,
                )
                for number, node in enumerate(nodes)
            ],
        )
        for place, nodes in enumerate(racks)
    ]
    return {int(inlet.rack): inlet for inlet in rack_inlets(rows)}


def main() -> int:
    from bench import stage

    parser = argparse.ArgumentParser(prog="python -m bench.thermal")
    parser.add_argument("--clusters", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    scores = [run(Random(options.seed * 1_000_003 + number)) for number in range(options.clusters)]
    everything = ThermalScore([error for score in scores for error in score.errors])
    named, missed, wrong = (sum(getattr(score, name) for score in scores) for name in ("named", "missed", "wrong"))
    bars = {
        "within_1_c": stage.bar("estimates within 1 °C", 100 * everything.within, 100 * BAR, unit=" %"),
        "missed": stage.bar("warm racks missed", missed, 0, at_least=False),
        "wrong": stage.bar("racks named wrongly", wrong, 0, at_least=False),
    }
    median_c = sorted(everything.errors)[len(everything.errors) // 2]
    return stage.result(
        "thermal", bars=bars, clusters=options.clusters, within=everything.within, median_error_c=median_c, named=named
    )


if __name__ == "__main__":
    raise SystemExit(main())
