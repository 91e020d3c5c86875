"""Read one curve of a machine or of one of its GPUs."""

from __future__ import annotations

from nodes.models import Agent
from nodes.telemetry import read
from portal.series.envelope import Outline
from portal.series.store import Owner


def outline(agent: Agent, owner: Owner, name: str, *, start: int, end: int, points: int | None = 1_000) -> Outline:
    return read.curves(agent, [(owner, name)], start=start, end=end, points=points)[owner, name].outline
