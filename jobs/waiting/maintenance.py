"""Explain what planned maintenance means for a job: what keeps it waiting now, and what lies ahead. Pure.

Where the scheduler reserves the nodes of a window, it starts no job whose time limit reaches into it. Else Vigil drains
the nodes at the start: until then jobs start there, and continue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from jobs.waiting.block import Block, MaintenanceEffect, WaitFacts, clock
from nodes.scheduling.capacity import CandidateNode, Request, assess
from nodes.scheduling.maintenance import PlannedMaintenance
from vigil_core import formatting

MAX_NAMES = 3


def effects(
    request: Request, candidates: Iterable[CandidateNode], windows: Sequence[PlannedMaintenance], now: float
) -> list[MaintenanceEffect]:
    """Return the windows that keep it waiting now, then those that its time limit reaches into, each by start."""
    usable = [candidate for candidate in candidates if not candidate.is_permanent]
    found = []
    for window in windows:
        there = [candidate for candidate in usable if candidate.node.name in window.nodes]
        if there and (effect := _effect(request, there, window, now, len(usable))):
            found.append(effect)
    return sorted(found, key=lambda effect: (not effect.is_blocking, effect.window.starts_at))


def _effect(
    request: Request, candidates: Sequence[CandidateNode], window: PlannedMaintenance, now: float, usable: int
) -> MaintenanceEffect | None:
    """Return what the window does to the job on these candidates, which are all of its nodes."""
    starts = max(now, request.begin_at or 0.0)
    ends = starts + request.time_limit_s
    if window.ends_at <= starts or window.starts_at >= ends:
        return None
    if window.is_active(now):
        nodes = tuple(candidate.node.name for candidate in candidates if candidate.why)
        text = (
            f"Maintenance on {_names(nodes, usable)} since {clock(window.starts_at, now)} ends at"
            f" {clock(window.ends_at, now)}, in {formatting.duration(window.ends_at - now)}: {_reason(window)}."
        )
        return MaintenanceEffect(window=window, nodes=nodes, text=text, is_blocking=True) if nodes else None
    nodes = tuple(candidate.node.name for candidate in candidates)
    text = (
        f"Maintenance begins on {_names(nodes, usable)} at {clock(window.starts_at, now)}, in"
        f" {formatting.duration(window.starts_at - now)}, and ends at {clock(window.ends_at, now)}: {_reason(window)}."
    )
    if not window.is_reserved:
        text += " No job starts there meanwhile; one that runs continues."
        return MaintenanceEffect(window=window, nodes=nodes, text=text, is_blocking=False)
    text += f" This job requests {formatting.duration(request.time_limit_s)}, so it starts there only afterwards."
    return MaintenanceEffect(window=window, nodes=nodes, text=text, is_blocking=True)


def summary(effect: MaintenanceEffect, now: float) -> str:
    """Return the shortest sentence about a window that keeps a job waiting."""
    if effect.window.is_active(now):
        return f"In maintenance until {clock(effect.window.ends_at, now)}."
    return f"It would run into maintenance at {clock(effect.window.starts_at, now)}."


def blocks(facts: WaitFacts, *, is_reason: bool) -> Iterator[Block]:
    """Yield the windows that keep a job waiting that has no room now.

    `is_reason`: the scheduler's reason is about nodes. It then means a window if the job needs its nodes.
    """
    if facts.fit.starts:
        return
    for effect in facts.maintenance:
        if effect.is_blocking:
            named = "maintenance" in facts.reason.lower()
            yield Block(
                kind="maintenance",
                text=effect.text,
                name=effect.window.reservation or effect.window.requester,
                is_reason=named or (is_reason and _are_needed(facts, effect.nodes)),
            )


def is_reserved_for(reservation: str, facts: WaitFacts) -> bool:
    """Return whether a reservation belongs to one of the windows that are named already."""
    names = {effect.window.reservation for effect in facts.maintenance if effect.is_blocking} - {""}
    return reservation in names


def drained(candidate: CandidateNode, facts: WaitFacts) -> bool:
    """Return whether the node is drained for a window that is named already."""
    windows = (effect.window for effect in facts.maintenance if effect.is_blocking)
    return any(candidate.node.name in window.nodes and window.has_drained(candidate.node.reason) for window in windows)


def _are_needed(facts: WaitFacts, nodes: Sequence[str]) -> bool:
    """Return whether the other nodes are too few for it, even if they were empty."""
    others = [candidate for candidate in facts.candidates if candidate.node.name not in nodes]
    return not assess(facts.request, others, facts.cluster).fits_if_empty


def _names(nodes: Sequence[str], usable: int) -> str:
    """Return the nodes by name if they are few, else how many; `usable` is how many the job could use without it."""
    if len(nodes) <= MAX_NAMES:
        return formatting.listed([*nodes])
    every = "all " if len(nodes) == usable else ""
    return f"{every}{formatting.count(len(nodes))} nodes that it could use ({nodes[0]} … {nodes[-1]})"


def _reason(window: PlannedMaintenance) -> str:
    return window.reason.rstrip(".")
