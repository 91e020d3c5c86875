"""A node that is slower than its peers is found by the programs that ran on both; nothing else is."""

from __future__ import annotations

from collections.abc import Iterable

from bench.slow_nodes import BAR, score
from jobs.reliability.slow_nodes import StepTime, slow_nodes

NODES = [f"n{number}" for number in range(8)]


def alone(program: str, seconds: float, nodes: Iterable[str] = NODES, **slower: float) -> list[StepTime]:
    """Return one attempt of a program on each node, some of which are slower by a factor."""
    return [StepTime(program, frozenset({node}), seconds * slower.get(node, 1.0)) for node in nodes]


def test_nearly_every_simulated_cluster_is_judged_right() -> None:
    right, counts = score(60, seed=7)
    assert min(right, counts.precision, counts.recall) >= BAR
    assert counts.right > 15


def test_a_node_a_fifth_slower_under_every_program() -> None:
    times = [time for number in range(4) for time in alone(f"p{number}", 1.0 + number, n3=1.2)]
    (found,) = slow_nodes(times)
    assert (found.node, found.ratio, found.programs, found.slow_programs) == ("n3", 1.2, 4, 4)
    assert found.other_nodes == 7


def test_one_slow_program_is_no_slow_node() -> None:
    times = [time for number in range(4) for time in alone(f"p{number}", 1.0)]
    assert slow_nodes([*times, *alone("slow", 9.0), *alone("only here", 50.0, ["n3"])]) == []
    assert slow_nodes([*times, *alone("hurt by its neighbour", 1.0, n3=1.5)]) == [], "one of five programs"


def test_who_only_ran_beside_a_slow_node_is_not_blamed() -> None:
    times = [time for number in range(3) for time in alone(f"p{number}", 1.0, n0=1.3)]
    times += [StepTime("pairs", frozenset({"n0", "n1"}), 2.6)]
    times += [StepTime("pairs", frozenset({a, b}), 2.0) for a, b in (("n2", "n3"), ("n4", "n5"), ("n6", "n7"))]
    assert [pace.node for pace in slow_nodes(times)] == ["n0"]


def test_too_few_others_say_nothing() -> None:
    assert slow_nodes(alone("p", 1.0, ["n0", "n1"], n0=2.0)) == []
    assert slow_nodes([]) == []
    assert slow_nodes([StepTime("p", frozenset({"n0"}), 0.0)]) == []
