"""Automatic drains never exceed their limits, whatever is found and in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.health.limits import (
    BREAKER_S,
    HOUR_S,
    AutomaticDrain,
    Opening,
    ServiceState,
    hourly_limit,
    partition_limit,
    refusal,
    tripping_rule,
)
from tests.examples import EXHAUSTIVE

NODES = [f"dgx-{number:02}" for number in range(40)]


def cluster(*out: str, nodes: int = 40) -> ServiceState:
    names = NODES[:nodes]
    half = frozenset(names[: nodes // 2])
    return ServiceState({"gpu": frozenset(names), "debug": half}, frozenset(out), nodes)


def test_a_node_of_a_small_cluster_may_be_drained_but_not_the_last_of_a_partition() -> None:
    assert hourly_limit(3) == 1
    assert hourly_limit(100) == 5
    assert partition_limit(4) == 0
    assert partition_limit(5) == 1
    assert refusal(cluster(nodes=4), [], "dgx-03", 0).startswith("gpu has 4 nodes. Vigil drains by itself only where a")
    assert "Approve the drain" in refusal(cluster(nodes=4), [], "dgx-03", 0)
    assert "debug has 1 node." in refusal(cluster(nodes=2), [], "dgx-00", 0)


def test_the_hour_and_the_partition_are_limits() -> None:
    drains = [AutomaticDrain("dgx-30", 1000), AutomaticDrain("dgx-31", 1100)]
    assert "2 of at most 2 nodes" in refusal(cluster(), drains, "dgx-05", 1200)
    assert refusal(cluster(), drains, "dgx-05", 1000 + HOUR_S) == ""
    assert "4 of 20 nodes of debug" in refusal(cluster(*NODES[:4]), [], "dgx-05", 0)
    assert "5 of 20 nodes of debug are out of service: that is" in refusal(cluster(*NODES[:5]), [], "dgx-03", 0)
    assert refusal(cluster(*NODES[:4]), [], "dgx-35", 0) == ""
    assert refusal(cluster(*NODES[:4]), [], "dgx-03", 0) == "", "it is out already: that takes nothing away"


@pytest.mark.timeout(900)  # ten thousand histories take half a minute on a quiet machine
@settings(max_examples=10_000 if EXHAUSTIVE else 300)
@given(st.lists(st.tuples(st.sampled_from(NODES), st.integers(0, 600), st.booleans()), max_size=120))
def test_no_history_exceeds_the_limits(history: list[tuple[str, int, bool]]) -> None:
    """Findings and people's drains come in any order; automatic drains stay within both limits at every moment."""
    now, out, drains = 0.0, set[str](), list[AutomaticDrain]()
    for node, gap, is_person in history:
        now += gap
        if is_person:
            out ^= {node}
            continue
        if refusal(cluster(*out), drains, node, now) == "":
            before = set(out)
            out.add(node)
            drains.append(AutomaticDrain(node, now))
            for members in cluster().partitions.values():
                if node in members and node not in before:
                    assert len(out & members) <= partition_limit(len(members))
        recent = {drain.node for drain in drains if drain.at > now - HOUR_S}
        assert len(recent) <= hourly_limit(40)


@pytest.mark.parametrize(("hit", "nodes", "trips"), [(2, 10, False), (3, 10, True), (3, 40, False), (4, 40, True)])
def test_a_rule_on_many_nodes_at_once_trips_the_breaker(hit: int, nodes: int, trips: bool) -> None:
    openings = [Opening("mount.hung", name, 100.0 + number) for number, name in enumerate(NODES[:hit])]
    found = tripping_rule(openings, nodes)
    assert found == (("mount.hung", hit) if trips else None)
    assert tripping_rule([*openings, *openings], nodes) == found, "a node counts once"
    assert tripping_rule([*openings, Opening("mount.hung", "dgx-39", 300.0)], nodes) == found, "another two minutes"


@given(st.lists(st.tuples(st.sampled_from(NODES[:8]), st.integers(0, 600)), max_size=30))
def test_the_breaker_counts_any_two_minutes(found: list[tuple[str, int]]) -> None:
    most = max((len({other for other, at in found if end - BREAKER_S <= at <= end}) for _, end in found), default=0)
    openings = [Opening("mount.hung", node, at) for node, at in found]
    assert tripping_rule(openings, 30) == (("mount.hung", most) if most >= 3 else None)
