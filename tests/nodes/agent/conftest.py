"""Provide a portal stand-in, eight stand-in GPUs, and running agents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.file_systems import small_file_system
from tests.nodes.agent.portal import PortalStandIn
from tests.nodes.agent.running import Running
from tests.nvml import StandIn


@pytest.fixture
def portal_stand_in() -> Iterator[PortalStandIn]:
    portal = PortalStandIn()
    portal.start()
    yield portal
    portal.hold.clear()
    portal.stop()


@pytest.fixture
def gpus(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path)


@pytest.fixture
def agent(tmp_path: Path, portal_stand_in: PortalStandIn, gpus: StandIn) -> Iterator[Running]:
    running = Running(tmp_path, portal_stand_in, gpus.environment)
    yield running
    running.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with small_file_system(tmp_path / "disk", "1m") as place:
        yield place
