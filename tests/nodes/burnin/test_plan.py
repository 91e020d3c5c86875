"""Every node meets every other node once, and never two at a time."""

from __future__ import annotations

import json
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from nodes.burnin.plan import GpuGroup, gpu_groups, pair_rounds, plan_text


@given(st.integers(2, 60))
def test_rounds_are_disjoint_and_complete(count: int) -> None:
    nodes = [f"dgx-{number:02}" for number in range(count)]
    rounds = pair_rounds(nodes)
    for pairs in rounds:
        names = [name for pair in pairs for name in pair]
        assert len(names) == len(set(names))
    met = [frozenset(pair) for pairs in rounds for pair in pairs]
    assert sorted(map(sorted, met)) == sorted(map(sorted, combinations(nodes, 2)))
    assert len(rounds) == (count if count % 2 else count - 1)


def test_a_single_node_has_no_pairs() -> None:
    assert json.loads(plan_text(["dgx-01"], 60, mounts=["/data"], scratch="/tmp"))["pairs"] == []


@given(st.dictionaries(st.text("abc-0123", min_size=1, max_size=6), st.integers(0, 16), max_size=20))
def test_every_node_is_in_the_group_of_its_number_of_gpus(gpus: dict[str, int]) -> None:
    groups = gpu_groups(gpus)
    assert {node: group.gpus for group in groups for node in group.nodes} == gpus
    assert sum(len(group.nodes) for group in groups) == len(gpus)
    assert [group.gpus for group in groups] == sorted(set(gpus.values()), reverse=True)


def test_nodes_with_equally_many_gpus_are_one_group() -> None:
    assert gpu_groups({"dgx-02": 8, "dgx-01": 8}) == [GpuGroup(8, ("dgx-01", "dgx-02"))]
