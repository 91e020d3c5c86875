"""Decide what Vigil would have done about past findings, within its limits and with its breaker. No Django.

Only the drains of the rule itself count as out of service: what else was drained then is not stored. A node returns
when its finding is over. Once the breaker has tripped, everything is proposed: a person has to reset it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from nodes.health import limits
from nodes.health.limits import AutomaticDrain, Opening, ServiceState
from nodes.health.replay import ReplayedEntry
from nodes.health.rules.rule import OUT_OF_SERVICE

Outcome = Literal["none", "drained", "already_drained", "held_back"]
TICK_S = 5.0
"""Findings that open within one evaluation are decided together: the breaker counts all of them first."""


@dataclass(frozen=True)
class RehearsedDecision:
    """What would have become of a finding; `held_back` says why Vigil would not have drained the node by itself."""

    outcome: Outcome
    held_back: str = ""


@dataclass
class Rehearsal:
    """The decisions in the order of the entries, and when the breaker would have tripped."""

    decisions: list[RehearsedDecision] = field(default_factory=list)
    tripped_at: float | None = None
    tripped_nodes: int = 0


def rehearse(
    rule: str, entries: Sequence[ReplayedEntry], partitions: Mapping[str, Collection[str]], nodes: Collection[str]
) -> Rehearsal:
    """Decide about entries, which are in order of their opening. Partitions and nodes are the cluster's of today."""
    members = {name: frozenset(names) for name, names in partitions.items()}
    rehearsal, drains = Rehearsal(), deque[AutomaticDrain]()
    recent, upcoming = deque[Opening](), deque(_openings(rule, entries))
    until: defaultdict[str, float] = defaultdict(float)
    for entry in entries:
        now, node = entry.opened_at, entry.subject.node
        if entry.action not in OUT_OF_SERVICE:
            rehearsal.decisions.append(RehearsedDecision("none"))
            continue
        while upcoming and upcoming[0].at <= now + TICK_S:
            recent.append(upcoming.popleft())
        while recent and recent[0].at < now - limits.BREAKER_S:
            recent.popleft()
        while drains and drains[0].at <= now - limits.HOUR_S:
            drains.popleft()
        if rehearsal.tripped_at is None and (found := limits.tripping_rule(recent, len(nodes))) is not None:
            rehearsal.tripped_at, rehearsal.tripped_nodes = now, found[1]
        if until[node] > now:
            rehearsal.decisions.append(RehearsedDecision("already_drained"))
            until[node] = max(until[node], _end(entry))
            continue
        out = frozenset(name for name, end in until.items() if end > now)
        held_back = "" if node in nodes else "The scheduler does not know this node."
        if rehearsal.tripped_at is not None:
            held_back = "The breaker would have stopped automatic actions."
        held_back = held_back or limits.refusal(ServiceState(members, out, len(nodes)), drains, node, now)
        rehearsal.decisions.append(RehearsedDecision("held_back" if held_back else "drained", held_back))
        if not held_back:
            until[node] = _end(entry)
            drains.append(AutomaticDrain(node, now))
    return rehearsal


def _openings(rule: str, entries: Iterable[ReplayedEntry]) -> Iterable[Opening]:
    return (Opening(rule, entry.subject.node, entry.opened_at) for entry in entries if entry.action in OUT_OF_SERVICE)


def _end(entry: ReplayedEntry) -> float:
    return float("inf") if entry.cleared_at is None else entry.cleared_at
