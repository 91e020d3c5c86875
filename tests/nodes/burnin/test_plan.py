"""Every node meets every other node once, and never two at a time."""

from __future__ import annotations

import json
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from nodes.burnin.plan import pair_rounds, plan_text


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
