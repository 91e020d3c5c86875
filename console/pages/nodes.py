"""The list of nodes: what they have, who holds it, what is out of service."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_safe

from console.pages import damaged_gpus
from console.pages.cluster import is_fragment, stale, varied
from console.pages.damaged_gpus import MARKS, Damage
from console.pages.free_slots import counted, free_now
from console.pages.rack_map import family, letters
from jobs.listing import visibility
from jobs.listing.queue import QueueSearch, unseen
from jobs.listing.visibility import Held
from nodes.models import Node, Partition, Reading
from portal.access import user_of
from vigil_core import formatting
from vigil_core.untrusted import plain

MOST = 120  # nodes a page: each is drawn with its GPUs


@dataclass(frozen=True)
class Cell:
    """A GPU of a node. `look`: idle, busy, mine or out; `mark` says the same without colour."""

    index: int
    look: str
    mark: str
    title: str
    url: str


@dataclass(frozen=True)
class NodeRow:
    """A node with what one person may know of who holds it."""

    node: Node
    held: list[Held]
    damage: Damage = field(default_factory=dict)

    @property
    def family(self) -> str:
        """The family whose glyph its state has."""
        is_damaged = bool(self.damage) and self.node.is_in_service
        return "warn" if is_damaged else family(self.node.state, self.node.is_in_service)

    @property
    def damage_text(self) -> str:
        """ "GPU 3 broken, GPU 5 lost"."""
        return ", ".join(f"GPU {index} {state}" for index, state in self.damage.items())

    @property
    def cells(self) -> list[Cell]:
        return [self._cell(index) for index in range(self.node.gpus)]

    @property
    def others(self) -> int:
        """How many more hold something than are named."""
        return max(0, len(self.held) - 2)

    @property
    def memory(self) -> str:
        """ "500 of 2,016 GiB": what is allocated."""
        used, there = (formatting.count(round(mib / 1024)) for mib in (self.node.memory_used_mib, self.node.memory_mib))
        return f"{used} of {there}{formatting.NBSP}GiB"

    def _cell(self, index: int) -> Cell:
        holder = next((held for held in self.held if index in held.gpus), None)
        place = f"GPU {index}"
        if (state := self.damage.get(index)) is not None:
            whose = f", {holder.name}, {holder.user}" if holder is not None and holder.user else ""
            return Cell(index, state, MARKS[state], f"{place}: {state}{whose}", "")
        if holder is not None:
            url = reverse("job", args=[holder.job]) if holder.job else ""
            whose = f"{holder.name}, {holder.user}" if holder.user else "in use"
            return Cell(index, "mine" if holder.is_mine else "busy", letters(holder.user), f"{place}: {whose}", url)
        if self._is_taken(index):
            return Cell(index, "busy", "", f"{place}: in use", "")
        if not self.node.takes_jobs:
            return Cell(index, "out", "–", f"{place}: {formatting.word(self.node.state)}", "")
        return Cell(index, "idle", "", f"{place}: free", "")

    def _is_taken(self, index: int) -> bool:
        """Whether this GPU is taken: some schedulers tell which are, others how many."""
        node = self.node
        return index in node.gpus_allocated if node.gpus_allocated else index < node.gpus_used


@dataclass(frozen=True)
class Group:
    """A partition and its nodes; a node of several stands in the first of them."""

    name: str
    partition: Partition | None
    nodes: list[NodeRow]
    free: str


@login_required
@require_safe
def index(request: HttpRequest) -> HttpResponse:
    user, now = user_of(request), timezone.now()
    everything = list(Node.objects.all())
    partition, text = plain(request.GET.get("partition", "")), plain(request.GET.get("q", ""))[:200]
    wanted = [node for node in everything if _matches(node, partition, text, request.GET.get("state", ""))]
    first = min(_whole(request.GET.get("from")), max(0, len(wanted) - 1))
    page = wanted[first : first + MOST]
    held = visibility.held_on(user, (node.name for node in page))
    jobs = QueueSearch().counts(user)
    damage = damaged_gpus.by_node()
    lead, more = say(everything, damage)
    context = {
        "section": "nodes",
        "fragment": is_fragment(request),
        "stale": stale(Reading.Part.NODES, now),
        "say": (lead, f"{more} {unseen(user).text}".strip()),
        "facts": facts(everything, jobs.get("pending", 0), jobs.get("running", 0)),
        "groups": grouped([NodeRow(node, held[node.name], damage.get(node.name, {})) for node in page], partition),
        "partitions": sorted({name for node in everything for name in node.partitions}),
        "partition": partition,
        "text": text,
        "state": request.GET.get("state", ""),
        "states": sorted({node.state for node in everything}),
        "any": bool(everything),
        "draws_gpus": any(node.gpus for node in page),
        "draws_damage": any(node.name in damage for node in page),
        "found": len(wanted),
        "first": first + 1,
        "last": first + len(page),
        "before": max(0, first - MOST) if first else None,
        "after": first + MOST if first + MOST < len(wanted) else None,
        "read": Reading.objects.filter(part=Reading.Part.NODES).values_list("read_at", flat=True).first(),
    }
    return varied(render(request, "nodes/_index.html" if is_fragment(request) else "nodes/index.html", context))


def say(nodes: list[Node], damage: Mapping[str, Damage]) -> tuple[str, str]:
    """Return the sentence that leads the page: what is out of service or broken, else that nothing is; what is free."""
    if not nodes:
        return "No node is known yet.", "The scheduler is asked within seconds of Vigil’s start."
    out = [node for node in nodes if not node.is_in_service]
    broken, free = damaged_gpus.sentence(nodes, damage), f"Free now: {free_now(nodes)}"
    if len(out) == 1:
        why = f": {out[0].reason}" if out[0].reason else ""
        return f"{out[0].name} is {formatting.word(out[0].state)}{why.rstrip('.')}. {broken}".strip(), free
    if out:
        names = formatting.listed([node.name for node in out[:3]]) if len(out) < 4 else f"{out[0].name} and others"
        return f"{formatting.plural(len(out), 'node')} are out of service: {names}. {broken}".strip(), free
    if broken:
        return broken, free
    everything = "The node is" if len(nodes) == 1 else f"All {formatting.plural(len(nodes), 'node')} are"
    return f"{everything} in service.", free


def facts(nodes: list[Node], waiting: int, running: int) -> list[tuple[str, str, str, str]]:
    """(title, value, what it is of, where it leads)."""
    places = counted(nodes)
    if not places:
        return []
    unit = places[0].unit
    total = formatting.plural(sum(place.total for place in places), unit)
    out = sum(not node.takes_jobs for node in nodes)
    of_nodes = formatting.plural(len(nodes), "node")
    queue = reverse("queue")
    return [
        ("In use", formatting.count(sum(place.used for place in places)), f"of {total}", ""),
        ("Free", *_counted(sum(place.free for place in places), unit), ""),
        ("Takes no jobs", formatting.count(out), f"of {of_nodes}", "?state=out" if out else ""),
        ("Running", *_counted(running, "job"), f"{queue}?state=running"),
        ("Waiting", *_counted(waiting, "job"), f"{queue}?state=pending"),
    ]


def _counted(number: int, one: str) -> tuple[str, str]:
    """("1", "job"), ("2", "jobs")."""
    value, _, unit = formatting.plural(number, one).partition(formatting.NBSP)
    return value, unit


def grouped(shown: Iterable[NodeRow], only: str) -> list[Group]:
    """Groups them by partition, the default one first; a node of several stands in the first of them."""
    known = {partition.name: partition for partition in Partition.objects.all()}
    order = {name: place for place, name in enumerate(known)}
    groups: dict[str, list[NodeRow]] = {}
    for one in shown:
        names = sorted(one.node.partitions, key=lambda name: (order.get(name, len(order)), name))
        groups.setdefault(only or (names[0] if names else ""), []).append(one)
    places = sorted(groups, key=lambda name: (not name, order.get(name, len(order)), name))
    return [Group(name, known.get(name), groups[name], free_now(s.node for s in groups[name])) for name in places]


def _matches(node: Node, partition: str, text: str, state: str) -> bool:
    if partition and partition not in node.partitions:
        return False
    if state and (node.takes_jobs if state == "out" else node.state != state):
        return False
    where = " ".join((node.name, node.reason, node.gpu_text, *node.features)).lower()
    return all(word in where for word in text.lower().split())


def _whole(text: str | None) -> int:
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 7 else 0
