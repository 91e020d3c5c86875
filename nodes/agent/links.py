"""Report InfiniBand links that went down, by the ports' own counters, however soon they were up again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nodes.agent import network

Event = dict[str, Any]


class LinkWatch:
    """Follows how often each port's link went down. What happened before its first read is not reported."""

    def __init__(self, sys: Path) -> None:
        self._sys = sys
        self._downs: dict[str, int] = {}

    def read(self, wall: float) -> list[Event]:
        """Return an event per port whose link went down since the last call."""
        before, self._downs = self._downs, network.link_downs(self._sys)
        return [
            {"kind": "link.down", "at": round(wall, 3), "port": port, "count": count - before[port]}
            for port, count in self._downs.items()
            if port in before and count > before[port]  # a smaller one was reset with its driver
        ]
