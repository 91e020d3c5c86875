"""A node that is slower than its peers is found by the programs that ran on both; nothing else is."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count

from bench.slow_nodes import BAR, score
from jobs.reliability.slow_nodes import StepTime, slow_nodes

NODES = [f"n{number}" for number in range(8)]


def alone(program: str, seconds: float, nodes: Iterable[str] = NODES, **slower: float) -> list[StepTime]:
    """Return one job of a program on each node; some nodes are slower by a factor."""
    return [time_of(program, {node}, seconds * slower.get(node, 1.0)) for node in nodes]


JOBS = count(1)


def time_of(program: str, nodes: Iterable[str], seconds: float, *, owner: int = 1, job: int = 0) -> StepTime:
    return StepTime(program, owner, job or next(JOBS), frozenset(nodes), seconds)


def test_nearly_every_simulated_cluster_is_judged_right() -> None:
    right, counts = score(60, seed=7)
    assert min(right, counts.precision, counts.recall) >= BAR
    assert counts.right > 15


def test_a_node_a_fifth_slower_under_every_program() -> None:
    times = [time for number in range(4) for time in alone(f"p{number}", 1.0 + number, n3=1.2)]
    (found,) = slow_nodes(times)
    assert (found.node, found.ratio, found.programs, found.slow_programs) == ("n3", 1.2, 4, 4)
    assert found.other_nodes == 7


def test_a_slow_program_is_no_slow_node() -> None:
    times = [time for number in range(4) for time in alone(f"p{number}", 1.0)]
    assert slow_nodes([*times, *alone("slow", 9.0), *alone("only here", 50.0, ["n3"])]) == []
    assert slow_nodes([*times, *alone("hurt by its neighbour", 1.0, n3=1.5)]) == [], "one of five programs"


def test_a_node_that_only_ran_alongside_a_slow_node_is_not_blamed() -> None:
    times = [time for number in range(3) for time in alone(f"p{number}", 1.0, n0=1.3)]
    times += [time_of("pairs", ("n0", "n1"), 2.6)]
    times += [time_of("pairs", pair, 2.0) for pair in (("n2", "n3"), ("n4", "n5"), ("n6", "n7"))]
    assert [pace.node for pace in slow_nodes(times)] == ["n0"]


def test_too_few_others_prove_nothing() -> None:
    assert slow_nodes(alone("p", 1.0, ["n0", "n1"], n0=2.0)) == []
    assert slow_nodes([]) == []
    assert slow_nodes([time_of("p", ("n0",), 0.0)]) == []


def test_restarts_of_a_job_count_once() -> None:
    times = [*alone("p", 1.0, NODES[1:]), *(time_of("p", ("n0",), 1.3, job=900) for _ in range(5))]
    (found,) = slow_nodes(times)
    assert (found.node, found.jobs, found.programs, found.owners) == ("n0", 1, 1, 1)


def test_the_owners_are_those_of_programs_that_are_slower_there() -> None:
    times = [time_of(f"{owner}", (node,), 1.3 if node == "n0" and owner else 1.0, owner=owner)
             for owner in range(4) for node in NODES]  # fmt: skip
    (found,) = slow_nodes(times)
    assert (found.programs, found.slow_programs, found.owners) == (4, 3, 3)


def test_on_request_it_also_returns_the_pace_of_nodes_that_are_not_slow() -> None:
    (found,) = slow_nodes(alone("p", 1.0), {"n2", "n99"})
    assert (found.node, found.ratio, found.slow_programs, found.owners) == ("n2", 1.0, 0, 0)
    assert slow_nodes(alone("p", 1.0, ["n0"]), {"n0"}) == [], "nothing to compare it with"
