"""Plan maintenance windows, and let the workers do what is due."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from nodes.cluster import drain, sync
from nodes.drains import maintenance
from nodes.models import Reading
from portal.models import User
from tests.nodes.remediation.cluster import Lab

HOUR = timedelta(hours=1)


def now() -> datetime:
    return datetime.now(UTC)


def planned(ops: User, nodes: str = "dgx-[01-02]", *, starts: float = -1, ends: float = 60, **more: Any) -> Any:
    """Plan a window, in minutes from now."""
    times = (now() + timedelta(minutes=minutes) for minutes in (starts, ends))
    return maintenance.plan(ops, nodes, more.pop("reason", "new switch"), *times, **more)


def at(lab: Lab, minutes: float = 0) -> None:
    """Let the workers do what is due so many minutes from now."""
    maintenance.advance(now() + timedelta(minutes=minutes))
    drain.carry_out(lab.scheduler)
    sync.read(lab.scheduler, Reading.Part.NODES)
