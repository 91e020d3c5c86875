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


def test_a_simulated_cluster_is_estimated_within_1_degree_and_its_warm_rack_is_found() -> None:
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


def test_an_inlet_is_estimated_only_from_steady_gpus_of_a_calibrated_model() -> None:
    resistance = {"H100": 0.05}
    assert node_inlet([("H100", gpu((300, 40)))], resistance) == 25
    assert node_inlet([("A100", gpu((300, 40)))], resistance) is None
    assert node_inlet([("H100", gpu((300, 40), minutes=2))], resistance) is None, "it may still be warming up"
    changing = gpu((300, 40))
    changing.observe(ThermalReading(420, 40, 600))
    assert node_inlet([("H100", changing)], resistance) is None
    late = gpu((300, 40))
    late.observe(ThermalReading(4000, 40, 300))
    assert node_inlet([("H100", late)], resistance) is None, "the time between was not observed"


def test_what_is_learnt_survives_storage_and_damage() -> None:
    before = gpu(*((100, 30), (500, 50)) * 3)
    assert GpuThermals.from_payload(before.as_payload()).as_payload() == before.as_payload()
    for damaged in (None, [], {}, [1, 2, 3, 4, 5], [["x"], None, None, True, []], ["", "", "", 0, ["x"]], "abcde"):
        assert GpuThermals.from_payload(damaged).pairs == []


def rack(name: str, *inlets: float, model: str = "H100") -> tuple[str, list[NodeInlet]]:
    return name, [NodeInlet(f"{name}-{place}", None, celsius, model) for place, celsius in enumerate(inlets)]


def above(*racks: tuple[str, list[NodeInlet]]) -> dict[str, float | None]:
    return {inlet.rack: inlet.above_neighbours_c for inlet in rack_inlets(racks)}


def test_a_rack_is_compared_with_its_neighbours() -> None:
    found = above(rack("A", 20, 21, 22), rack("B", 24), rack("C", 20), rack("D", 21), rack("E"))
    assert found == {"A": -1, "B": 3, "C": -1, "D": -1}
    assert above(rack("A", 20)) == {"A": None}


def test_racks_without_values_keep_their_places() -> None:
    found = above(rack("A", 20), rack("B"), rack("C"), rack("D", 24), rack("E"), rack("F"), rack("G", 20))
    assert found == {"A": None, "D": None, "G": None}, "the next rack with a value is three places away"


def test_estimates_are_compared_with_those_of_the_same_model() -> None:
    """What stands between a node's front and its GPUs depends on the model: here 4 °C, which is no heat."""
    row = [rack("A", 20, 20), rack("B", 20, 20), rack("C", 24, 24, model="B200"), rack("D", 20, 20), rack("E", 20, 20)]
    assert above(*row) == {"A": None, "B": 0, "C": None, "D": 0, "E": None}, "A and E have one such neighbour"
    mixed = ("C", [*rack("C", 23, 23)[1], *rack("c", 24, model="B200")[1]])
    assert above(*row[:2], mixed, *row[3:])["C"] == 3


def measured(name: str, *inlets: float, offset: float = 3.0, model: str = "H100") -> tuple[str, list[NodeInlet]]:
    return name, [NodeInlet(f"{name}-{n}", celsius, celsius + offset, model) for n, celsius in enumerate(inlets)]


def test_measurements_count_more_than_estimates_and_correct_them() -> None:
    first, second, other = rack_inlets([measured("M", 20, 21, 22), rack("E", 25.0), rack("O", 27.0, model="B200")])
    assert (first.inlet_c, first.is_estimate) == (21.0, False)
    assert (second.inlet_c, second.is_estimate) == (22.0, True)
    assert other.inlet_c == 27.0, "no node of its model measures"


def test_a_single_broken_bmc_corrects_nothing() -> None:
    racks = [rack("A", 24), measured("B", 0, offset=24), rack("C", 24), rack("D", 24)]
    assert {inlet.rack: inlet.inlet_c for inlet in rack_inlets(racks)} == {"A": 24, "B": 0, "C": 24, "D": 24}
    assert above(*racks) == {"A": None, "B": None, "C": 0, "D": None}
    many = ("B", [*measured("b", 0, offset=24)[1], *rack("B", 24, 24, 24)[1]])
    assert above(*[many if item[0] == "B" else item for item in racks])["B"] == 0


def test_a_rack_with_few_measured_nodes_is_not_compared() -> None:
    silent = [NodeInlet(f"silent-{number}", model="H100") for number in range(3)]
    warm = ("B", [*rack("B", 30)[1], *silent])
    assert above(rack("A", 20), warm, rack("C", 20), rack("D", 20))["B"] is None
    without_gpus = ("B", [*rack("B", 30)[1], *(NodeInlet(f"login-{number}") for number in range(9))])
    assert above(rack("A", 20), without_gpus, rack("C", 20))["B"] == 10


def test_a_single_steady_gpu_is_not_enough_for_a_node_with_more() -> None:
    steady, changing = gpu((300, 40)), gpu((300, 40), minutes=2)
    assert node_inlet([("H100", steady)], {"H100": 0.05}) == 25
    assert node_inlet([("H100", steady), ("H100", changing)], {"H100": 0.05}) is None
    assert node_inlet([("H100", steady), ("H100", changing), ("H100", steady)], {"H100": 0.05}) == 25
