"""Every node meets every other node once, and never two at a time."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from nodes.burnin.plan import MAX_MOUNTS, MAX_NODES, plan_text
from training.burnin.plan import BurnInPlan, read_plan


@given(st.integers(1, 60))
def test_rounds_are_disjoint_and_complete(count: int) -> None:
    nodes = tuple(f"dgx-{number:02}" for number in range(count))
    plan = BurnInPlan(nodes, 60, (), "/tmp")
    met = []
    for round_ in range(plan.rounds):
        partners = {node: plan.partner_of(node, round_) for node in nodes}
        pairs = {frozenset((node, partner)) for node, partner in partners.items() if partner is not None}
        assert len(pairs) * 2 == sum(partner is not None for partner in partners.values()), "both know of their pair"
        met += map(sorted, pairs)
    assert sorted(met) == sorted(map(sorted, combinations(nodes, 2)))
    assert plan.rounds == (count - 1 + count % 2 if count > 1 else 0)


def test_reads_the_largest_plan(tmp_path: Path) -> None:
    nodes = [f"dgx-{number:03}.cluster.example" for number in range(MAX_NODES)]
    mounts = ["/" + "m" * 200] * MAX_MOUNTS
    (tmp_path / "portal").mkdir()
    (tmp_path / "portal" / "plan.json").write_text(plan_text(nodes, 60, mounts=mounts, scratch="/tmp"))
    assert read_plan(tmp_path) == BurnInPlan(tuple(nodes), 60, tuple(mounts), "/tmp")
