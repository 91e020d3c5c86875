"""Test when a GPU is hot, and that map and node page agree; for post-mortems see test_evidence.py."""

from __future__ import annotations

import pytest

from console.pages.cluster_map import layout
from console.pages.cluster_map.rows import MapGpu, MapNode
from nodes.health.temperature import is_hot
from nodes.presenting.machine import GpuState


@pytest.mark.parametrize(
    ("temperature_c", "slowdown_c", "throttle", "hot"),
    [
        (84, 87, 0, True),
        (83, 87, 0, False),
        (86, None, 0, True),
        (85, None, 0, False),
        (86, 92, 0, False),
        (40, 87, 0x40, True),
        (40, 87, 0x20, True),
        (40, 87, 0x04, False),
        (None, 87, 0, False),
        (None, None, 0x40, True),
    ],
)
def test_map_and_node_page_agree(temperature_c: int | None, slowdown_c: int | None, throttle: int, hot: bool) -> None:
    assert is_hot(temperature_c, slowdown_c, throttle=throttle) is hot
    facts = {"temperature_c": temperature_c, "slowdown_c": slowdown_c, "throttle": throttle}
    assert GpuState(index=0, **facts).is_hot is hot
    device = MapGpu(0, 1, is_allocated=True, **facts)
    assert (layout._state(device, MapNode("n")) == "hot") is hot
