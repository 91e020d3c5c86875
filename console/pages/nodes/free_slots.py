"""Show free capacity of nodes, as a drawing and in words, for the home page and the page of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from nodes.models import Node
from vigil_core import formatting

MAX_CELLS = 16


@dataclass(frozen=True)
class FreeSlots:
    """One node in the drawing of free slots: a cell per GPU, or a bar of CPUs if it has no GPUs."""

    node: Node

    @property
    def unit(self) -> str:
        return "GPU" if self.node.gpus else "CPU"

    @property
    def total(self) -> int:
        return self.node.gpus or self.node.cpus

    @property
    def used(self) -> int:
        return min(self.total, self.node.gpus_used if self.node.gpus else self.node.cpus_used)

    @property
    def free(self) -> int:
        return self.node.gpus_free if self.node.gpus else self.node.cpus_free

    @property
    def is_out(self) -> bool:
        return not self.node.takes_jobs

    @property
    def cells(self) -> list[tuple[int, str]]:
        """Return (x, style) of each cell; a cell stands for several GPUs where a node has more than fit."""
        shown = min(self.total, MAX_CELLS)
        if self.is_out:
            return [(i * 8, "out") for i in range(shown)]
        used = round(shown * self.used / self.total) if self.total else 0
        if self.used and not used:
            used = 1
        return [(i * 8, "keep" if i < used else "free") for i in range(shown)]


def countable(nodes: Iterable[Node]) -> list[FreeSlots]:
    """Return the nodes that free slots are counted on: those with GPUs, or all if none has any."""
    places = [FreeSlots(node) for node in nodes]
    return [place for place in places if place.unit == "GPU"] or places


def _free_by_type(nodes: Iterable[Node]) -> str:
    """Return "1 a100, 12 1g.10gb" where some node has several types, so that their sum says little; else ""."""
    nodes = list(nodes)
    free: Counter[str] = Counter()
    if not any(node.gpus_by_type for node in nodes):
        return ""
    for node in nodes:
        for kind in node.gpu_types:
            free[kind["type"] or "without a type"] += kind["free"]
    return ", ".join(f"{formatting.count(count)} {kind}" for kind, count in sorted(free.items()) if count)


def free_now(nodes: Iterable[Node]) -> str:
    """Return free capacity in words: "40 of 64 GPUs: 3 nodes whole, 16 in pieces of 1 to 4."; "" without nodes."""
    places = countable(nodes)
    if not places:
        return ""
    free, total = sum(place.free for place in places), sum(place.total for place in places)
    text = f"{formatting.count(free)} of {formatting.plural(total, places[0].unit)}"
    if by_type := _free_by_type(place.node for place in places):
        return f"{text}: {by_type}."
    if len(places) == 1 or not free:
        return f"{text}."
    whole = sum(place.free == place.total for place in places)
    parts = [place.free for place in places if 0 < place.free < place.total]
    if not whole and len(parts) == 1:
        return f"{text}, on one node."
    return f"{text}: {_pieces(whole, parts)}."


def _pieces(whole: int, parts: list[int]) -> str:
    """Return how free capacity is divided: nodes that are wholly free, and what is left between jobs on others."""
    words = [f"{formatting.plural(whole, 'node')} whole"] if whole else []
    if parts:
        least, most = formatting.count(min(parts)), formatting.count(max(parts))
        size = least if least == most else f"{least} to {most}"
        where = "on one node" if len(parts) == 1 else f"in pieces of {size}"
        words.append(f"{formatting.count(sum(parts))} {where}")
    return ", ".join(words)
