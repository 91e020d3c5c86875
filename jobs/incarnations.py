"""Read what an attempt's launchers report of its incarnations: the ranks that run between restarts in place."""

from __future__ import annotations

from typing import Any, NamedTuple

from jobs.models import Attempt, Event

STARTED = "incarnation.started"


class IncarnationSize(NamedTuple):
    ranks: int
    nodes: int


def size_of(attempt: Attempt) -> IncarnationSize | None:
    """Return the newest incarnation's size; None before the first."""
    data = _newest(attempt)
    ranks, nodes = data.get("world_size"), data.get("nodes")
    return IncarnationSize(ranks, len(nodes)) if isinstance(ranks, int) and isinstance(nodes, list) and nodes else None


def idle_spares(attempt: Attempt, spares: int) -> set[str]:
    """Return the attempt's nodes on which the newest incarnation runs no rank: spares, or nodes that it has lost.

    Returns an empty set if these are more than the requested spares: then the job itself reports them.
    """
    nodes = _newest(attempt).get("nodes")
    if not isinstance(nodes, list):
        return set()
    found = set(attempt.nodes).difference(node for node in nodes if isinstance(node, str))
    return found if len(found) <= spares else set()


def _newest(attempt: Attempt) -> dict[str, Any]:
    """Return what was reported of the newest incarnation. Lost launchers may report theirs late."""
    started = Event.objects.filter(attempt=attempt, kind=STARTED).order_by("-id")
    return max(started.values_list("data", flat=True)[:20], key=number_of, default={})


def number_of(data: dict[str, Any]) -> int:
    """Return the incarnation's number in a launcher's event; 0 if it has none."""
    number = data.get("incarnation")
    return number if isinstance(number, int) else 0
