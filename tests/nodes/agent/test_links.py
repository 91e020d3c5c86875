"""Links that went down are reported by the ports' counters, each time once."""

from __future__ import annotations

from pathlib import Path

import pytest

from nodes.agent.links import LinkWatch


@pytest.fixture
def count(tmp_path: Path) -> Path:
    """Return the file of a port's counter."""
    folder = tmp_path / "class/infiniband/mlx5_0/ports/1/counters"
    folder.mkdir(parents=True)
    file = folder / "link_downed"
    file.write_text("7\n")
    return file


def test_what_happened_before_the_agent_began_is_not_reported(tmp_path: Path, count: Path) -> None:
    watch = LinkWatch(tmp_path)
    assert watch.read(1.0) == []
    assert watch.read(2.0) == []
    count.write_text("9\n")
    assert watch.read(3.0) == [{"kind": "link.down", "at": 3.0, "port": "mlx5_0/1", "count": 2}]
    assert watch.read(4.0) == []


def test_a_counter_that_was_reset_or_is_gone_is_no_loss(tmp_path: Path, count: Path) -> None:
    watch = LinkWatch(tmp_path)
    watch.read(1.0)
    count.write_text("0\n")
    assert watch.read(2.0) == []
    count.write_text("garbage")
    assert watch.read(3.0) == []
    count.write_text("5")
    assert watch.read(4.0) == [], "nobody knows when"
    assert LinkWatch(tmp_path / "none").read(1.0) == []
