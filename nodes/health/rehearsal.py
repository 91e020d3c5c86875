"""Decide what Vigil would have done about past findings, within its limits and with its breaker. No Django.

Only the drains of the rule itself count as out of service: what else was drained then is not stored. A node returns
when its finding is over. Once the breaker has tripped, everything is proposed: a person has to reset it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
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
    """Describes what Vigil would have done about a finding; `held_back` says why it would not have drained the node."""

    outcome: Outcome
    held_back: str = ""


@dataclass(frozen=True)
class Rehearsal:
    """The decisions in the order of the entries, and when the breaker would have tripped."""

    decisions: Sequence[RehearsedDecision]
    tripped_at: float | None = None


def rehearse(
    rule: str, entries: Sequence[ReplayedEntry], partitions: Mapping[str, Collection[str]], nodes: Collection[str]
) -> Rehearsal:
    """Decide about entries, which are in order of their opening. Partitions and nodes are the cluster's of today."""
    members = {name: frozenset(names) for name, names in partitions.items()}
    cluster = _RehearsedCluster(members, frozenset(nodes), deque(_openings(rule, entries)))
    decisions = [
        cluster.decide(entry) if entry.action in OUT_OF_SERVICE else RehearsedDecision("none") for entry in entries
    ]
    return Rehearsal(decisions, cluster.tripped_at)


@dataclass
class _RehearsedCluster:
    """The cluster while findings are decided, one after the other."""

    partitions: Mapping[str, frozenset[str]]
    nodes: frozenset[str]
    upcoming: deque[Opening]
    """Openings that the breaker does not count yet, and those of the last minutes, which it counts."""
    recent: deque[Opening] = field(default_factory=deque)
    tripped_at: float | None = None
    drains: deque[AutomaticDrain] = field(default_factory=deque)
    until: dict[str, float] = field(default_factory=dict)
    """When each node that is out of service returns."""
    returns: list[tuple[float, str]] = field(default_factory=list)
    """A heap of the same; an entry is outdated if the node's drain was extended meanwhile."""

    def decide(self, entry: ReplayedEntry) -> RehearsedDecision:
        now, node = entry.opened_at, entry.subject.node
        self._advance(now)
        if node in self.until:
            self._drain(node, max(self.until[node], _end(entry)))
            return RehearsedDecision("already_drained")
        if held_back := self._obstacle(node, now):
            return RehearsedDecision("held_back", held_back)
        self._drain(node, _end(entry))
        self.drains.append(AutomaticDrain(node, now))
        return RehearsedDecision("drained")

    def _obstacle(self, node: str, now: float) -> str:
        """Return why Vigil would not have drained the node by itself; "" if it would."""
        if self.tripped_at is not None:
            return "The breaker would have stopped automatic actions."
        if node not in self.nodes:
            return "The scheduler does not know this node."
        state = ServiceState(self.partitions, frozenset(self.until), len(self.nodes))
        return limits.refusal(state, self.drains, node, now)

    def _advance(self, now: float) -> None:
        """Count the openings up to now, forget what the limits no longer count, and return nodes to service."""
        while self.upcoming and self.upcoming[0].at <= now + TICK_S:
            self.recent.append(self.upcoming.popleft())
        while self.recent and self.recent[0].at < now - limits.BREAKER_S:
            self.recent.popleft()
        while self.drains and self.drains[0].at <= now - limits.HOUR_S:
            self.drains.popleft()
        if self.tripped_at is None and limits.tripping_rule(self.recent, len(self.nodes)) is not None:
            self.tripped_at = now
        while self.returns and self.returns[0][0] <= now:
            end, node = heappop(self.returns)
            if self.until.get(node) == end:
                del self.until[node]

    def _drain(self, node: str, until: float) -> None:
        self.until[node] = until
        heappush(self.returns, (until, node))


def _openings(rule: str, entries: Iterable[ReplayedEntry]) -> Iterable[Opening]:
    return (Opening(rule, entry.subject.node, entry.opened_at) for entry in entries if entry.action in OUT_OF_SERVICE)


def _end(entry: ReplayedEntry) -> float:
    return float("inf") if entry.cleared_at is None else entry.cleared_at
