"""Read what agents reported: JSON of any shape, in which whatever has another type than expected is unknown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nodes.models import Agent
from vigil_core import untrusted

MAX_COUNTED = 1e15


def table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def listed(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else ()


def number(values: Mapping[str, Any], name: str) -> float | None:
    value = values.get(name)
    if value.__class__ is int and 0 <= value <= MAX_COUNTED:  # nearly always: an evaluation reads 100,000 of them
        return float(value)
    return untrusted.number(value, MAX_COUNTED) if not isinstance(value, bool) else float(value)


def host_values(agent: Agent) -> Mapping[str, Any]:
    return table(table(agent.newest).get("host"))


def mounted(agent: Agent) -> dict[str, str]:
    """Return the mounts that the agent probes: source by path."""
    rows = table(agent.facts).get("mounts")
    found = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return {
        path: untrusted.line(row.get("source"), 300) or path
        for row in found
        if (path := untrusted.line(row.get("mount"), 300))
    }
