"""Inlet temperatures are estimated within 1 °C on simulated clusters, and a warm rack is found (see bench.thermal)."""

from __future__ import annotations

from random import Random

from bench.thermal import BAR, run
from nodes.health.inlet import GpuThermals, NodeInlet, ThermalReading, node_inlet, rack_inlets, resistances


def gpu(*levels: tuple[float, float], minutes: int = 6) -> GpuThermals:
    """Return a GPU that stayed at each (watts, °C) for some minutes."""
    found, at = GpuThermals(), 0.0
    for watts, celsius in levels:
        for _ in range(minutes):
            at += 60
            found.observe(ThermalReading(at, celsius, watts))
    return found


def test_what_is_stored_otherwise_is_nothing_learnt() -> None:
    learnt = gpu((100, 30), (500, 50))
    assert GpuThermals.from_payload(learnt.as_payload()) == learnt
    assert GpuThermals.from_payload([["x", 30, 100, 1], None, None, False, []]) == GpuThermals()


def test_a_simulated_cluster_is_estimated_within_one_degree_and_its_warm_rack_is_found() -> None:
    warm = next(seed for seed in range(20) if _has_warm_rack(seed))
    score = run(Random(warm))
    assert score.within >= BAR
    assert (score.named, score.missed, score.wrong) == (1, 0, 0)


def _has_warm_rack(seed: int) -> bool:
    return run(Random(seed), minutes=1).missed == 1


def test_a_resistance_is_learnt_from_changes_of_load() -> None:
    swings = ((100, 30), (500, 50)) * 4
    assert resistances([("H100", gpu(*swings))]) == {"H100": 0.05}
    assert resistances([("H100", gpu((100, 30), (500, 50)))]) == {}, "one change is too few"
    assert resistances([("H100", gpu(*((100, 30), (200, 35)) * 9))]) == {}, "the loads are too alike"
    assert resistances([("H100", gpu(*((100, 30), (500, 20)) * 9))]) == {}, "cooler under load is no resistance"


def test_an_inlet_is_estimated_only_from_steady_gpus_of_a_known_model() -> None:
    known = {"H100": 0.05}
    assert node_inlet([("H100", gpu((300, 40)))], known) == 25
    assert node_inlet([("A100", gpu((300, 40)))], known) is None
    assert node_inlet([("H100", gpu((300, 40), minutes=2))], known) is None, "it may still be warming up"
    changing = gpu((300, 40))
    changing.observe(ThermalReading(420, 40, 600))
    assert node_inlet([("H100", changing)], known) is None
    late = gpu((300, 40))
    late.observe(ThermalReading(4000, 40, 300))
    assert node_inlet([("H100", late)], known) is None, "nothing is known of the time between"


def test_what_is_learnt_survives_storage_and_damage() -> None:
    before = gpu(*((100, 30), (500, 50)) * 3)
    assert GpuThermals.from_payload(before.as_payload()).as_payload() == before.as_payload()
    for damaged in (None, [], {}, [1, 2, 3, 4, 5], [["x"], None, None, True, []], ["", "", "", 0, ["x"]], "abcde"):
        assert GpuThermals.from_payload(damaged).pairs == []


def rack(name: str, *inlets: float) -> tuple[str, list[NodeInlet]]:
    return name, [NodeInlet(f"{name}-{place}", None, celsius) for place, celsius in enumerate(inlets)]


def test_a_rack_is_compared_with_those_beside_it() -> None:
    found = rack_inlets([rack("A", 20, 21, 22), rack("B", 24), rack("C", 20), rack("D", 21), rack("E")])
    assert {inlet.rack: inlet.above_neighbours_c for inlet in found} == {"A": -1, "B": 3, "C": -1, "D": -1}
    (alone,) = rack_inlets([rack("A", 20)])
    assert alone.above_neighbours_c is None


def test_measurements_count_more_than_estimates_and_correct_them() -> None:
    measured = ("M", [NodeInlet("m0", 20.0, 23.0), NodeInlet("m1", 21.0, 24.0)])
    first, second = rack_inlets([measured, rack("E", 25.0)])
    assert (first.inlet_c, first.is_estimate) == (20.5, False)
    assert (second.inlet_c, second.is_estimate) == (22.0, True)
