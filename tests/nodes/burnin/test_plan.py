"""Nodes with different numbers of GPUs are tested as groups."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nodes.burnin.plan import MAX_NODES, GpuGroup, gpu_groups, time_limit_s


@given(st.dictionaries(st.text("abc-0123", min_size=1, max_size=6), st.integers(0, 16), max_size=20))
def test_every_node_is_in_the_group_of_its_number_of_gpus(gpus: dict[str, int]) -> None:
    groups = gpu_groups(gpus)
    assert {node: group.gpus for group in groups for node in group.nodes} == gpus
    assert sum(len(group.nodes) for group in groups) == len(gpus)
    assert [group.gpus for group in groups] == sorted(set(gpus.values()), reverse=True)


def test_nodes_with_equally_many_gpus_form_a_group() -> None:
    assert gpu_groups({"dgx-02": 8, "dgx-01": 8}) == [GpuGroup(8, ("dgx-01", "dgx-02"))]


def test_every_node_has_time_to_meet_every_other_in_a_short_burn_in() -> None:
    a_turn = 10  # for processes to start that import torch, and to find each other
    assert time_limit_s(600, MAX_NODES) > 600 + 500 + (MAX_NODES - 1) * a_turn
    assert time_limit_s(600, 1) == 3_000
