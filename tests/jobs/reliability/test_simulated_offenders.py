"""Test that the rules name what is broken on simulated clusters, and nothing else (bench.offenders has more)."""

from __future__ import annotations

from bench.offenders import BAR, score


def test_nearly_every_cluster_is_judged_right() -> None:
    right, nodes, programs = score(200, seed=7)
    assert right >= BAR
    assert min(nodes.precision, nodes.recall, programs.precision, programs.recall) >= BAR
    assert nodes.right > 40
    assert programs.right > 40
