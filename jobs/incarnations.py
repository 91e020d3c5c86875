"""What an attempt's launchers tell of its incarnations: the ranks that run from one restart in place to the next."""

from __future__ import annotations

from typing import Any, NamedTuple

from jobs.models import Attempt, Event

STARTED = "incarnation.started"


class Spread(NamedTuple):
    ranks: int
    nodes: int


def spread(attempt: Attempt) -> Spread | None:
    """The newest incarnation's spread; None before the first."""
    data = _newest(attempt)
    ranks, nodes = data.get("world_size"), data.get("nodes")
    return Spread(ranks, len(nodes)) if isinstance(ranks, int) and isinstance(nodes, list) and nodes else None


def standing_by(attempt: Attempt, spares: int) -> set[str]:
    """The attempt's nodes on which the newest incarnation runs no rank: spares, or what it has gone on without.

    None where that leaves out more than were asked for: it is the job's own word.
    """
    nodes = _newest(attempt).get("nodes")
    if not isinstance(nodes, list):
        return set()
    found = set(attempt.nodes).difference(one for one in nodes if isinstance(one, str))
    return found if len(found) <= spares else set()


def _newest(attempt: Attempt) -> dict[str, Any]:
    """What was told of the newest incarnation. Lost launchers may be late in telling of theirs."""
    started = Event.objects.filter(attempt=attempt, kind=STARTED).order_by("-id")
    return max(started.values_list("data", flat=True)[:20], key=number_of, default={})


def number_of(data: dict[str, Any]) -> int:
    """The number of the incarnation that a launcher's event tells of; 0 where it tells none."""
    number = data.get("incarnation")
    return number if isinstance(number, int) else 0
