"""Recognise GPUs, mounts and ports that no longer exist: nothing is observed of them, yet their findings must end.

A GPU was replaced or moved, a mount removed, a port renamed. A mount or port that most other nodes still have is
missing on this node rather than removed: its findings stay open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from functools import cached_property

from nodes.health.progress import Subject
from nodes.models import Agent
from nodes.monitoring.reported import mounted
from nodes.monitoring.states import States


class RemovedParts:
    """Recognises the GPUs, mounts and ports of reporting agents that no longer exist."""

    def __init__(self, states: States) -> None:
        self.states = states
        self._agents = {agent.node: agent for agent in states.agents.values() if not agent.is_silent(states.now)}

    def among(self, subjects: Iterable[Subject]) -> set[Subject]:
        """Return those of the subjects that no longer exist."""
        return {subject for subject in subjects if self._is_removed(subject)}

    def _is_removed(self, subject: Subject) -> bool:
        agent = self._agents.get(subject.node)
        if agent is None:
            return False
        if subject.gpu:
            return self._is_replaced(agent, subject.gpu)
        return bool(subject.item) and self._is_unlisted(agent, subject.item)

    def _is_replaced(self, agent: Agent, uuid: str) -> bool:
        """Return whether another node has the GPU, or another GPU has its slot."""
        if uuid in self._nodes_of_gpus:
            return self._nodes_of_gpus[uuid] != agent.pk
        slots = {gpu.bus for gpu in self.states.gpus.get(agent.pk, ()) if gpu.bus}
        return any(gpu.uuid == uuid and gpu.bus in slots for gpu in self.states.gone.get(agent.pk, ()))

    def _is_unlisted(self, agent: Agent, item: str) -> bool:
        listed = _items(agent, item)
        others = len(self._agents) - 1
        return bool(listed is not None and item not in listed and 2 * self._nodes_with[item] <= others)

    @cached_property
    def _nodes_of_gpus(self) -> dict[str, int]:
        return {gpu.uuid: pk for pk, gpus in self.states.gpus.items() for gpu in gpus}

    @cached_property
    def _nodes_with(self) -> Counter[str]:
        """Return on how many nodes there is a mount or port of this name."""
        return Counter(item for agent in self._agents.values() for item in {*mounted(agent), *_ports(agent)})


def _items(agent: Agent, item: str) -> Collection[str] | None:
    """Return all mounts or all ports that the agent lists, whichever the item is one of; None if they are unknown."""
    if item.startswith("/"):
        is_known = isinstance(agent.facts, dict) and isinstance(agent.facts.get("mounts"), list)
        return mounted(agent) if is_known else None
    return _ports(agent) or None


def _ports(agent: Agent) -> set[str]:
    host = agent.newest.get("host") if isinstance(agent.newest, dict) else None
    names = host if isinstance(host, dict) else {}
    return {name.removeprefix(_PORT)[:64] for name in names if name.startswith(_PORT)}


_PORT = "ib_up:"
