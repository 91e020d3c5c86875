"""Render the list of nodes: their hardware, who uses it, and what is out of service."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from django.contrib.auth.decorators import login_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_safe

from console.pages.cluster_map.layout import family, initials
from console.pages.freshness import stale_text
from console.pages.nodes import damaged_gpus
from console.pages.nodes.damaged_gpus import MARKS, Damage
from console.pages.nodes.free_slots import countable, free_now
from console.pages.requests import is_fragment, vary_on_fragment
from jobs.listing import visibility
from jobs.listing.queue import QueueSearch, unseen_jobs
from jobs.listing.visibility import NodeAllocation
from nodes.models import Node, Partition, Reading
from nodes.scheduling import node_states
from portal.access import user_of
from vigil_core import formatting
from vigil_core.untrusted import plain, whole

NODES_PER_PAGE = 120  # nodes a page: each is drawn with its GPUs


@dataclass(frozen=True)
class GpuCell:
    """A GPU of a node. `state`: idle, busy, mine or out; `mark` shows the same without colour."""

    index: int
    state: str
    mark: str
    title: str
    url: str


@dataclass(frozen=True)
class NodeRow:
    """A node with its jobs, as far as one person may see them."""

    node: Node
    jobs: list[NodeAllocation]
    damage: Damage = field(default_factory=dict)

    @property
    def family(self) -> str:
        """Return the family whose glyph its state has."""
        is_damaged = bool(self.damage) and self.node.is_in_service
        return "warn" if is_damaged else family(self.node.state, self.node.is_in_service)

    @property
    def damage_text(self) -> str:
        """Return damaged GPUs as text: "GPU 3 broken, GPU 5 lost"."""
        return ", ".join(f"GPU {index} {state}" for index, state in self.damage.items())

    @property
    def cells(self) -> list[GpuCell]:
        return [self._cell(index) for index in range(self.node.gpus)]

    @property
    def others(self) -> int:
        """Return how many more jobs it has than are named."""
        return max(0, len(self.jobs) - 2)

    @property
    def memory(self) -> str:
        """Return allocated memory as text: "500 of 2,016 GiB"."""
        used, there = (formatting.count(round(mib / 1024)) for mib in (self.node.memory_used_mib, self.node.memory_mib))
        return f"{used} of {there}{formatting.NBSP}GiB"

    def _cell(self, index: int) -> GpuCell:
        holder = next((job for job in self.jobs if index in job.gpus), None)
        place = f"GPU {index}"
        if (state := self.damage.get(index)) is not None:
            owner = f", {holder.name}, {holder.user}" if holder is not None and holder.user else ""
            return GpuCell(index, state, MARKS[state], f"{place}: {state}{owner}", "")
        if holder is not None:
            url = reverse("job", args=[holder.job]) if holder.job else ""
            owner = f"{holder.name}, {holder.user}" if holder.user else "in use"
            return GpuCell(index, "mine" if holder.is_mine else "busy", initials(holder.user), f"{place}: {owner}", url)
        if self._is_taken(index):
            return GpuCell(index, "busy", "", f"{place}: in use", "")
        if not self.node.takes_jobs:
            return GpuCell(index, "out", "–", f"{place}: {formatting.word(self.node.state)}", "")
        return GpuCell(index, "idle", "", f"{place}: free", "")

    def _is_taken(self, index: int) -> bool:
        """Return whether this GPU is allocated: some schedulers say which are, others only how many."""
        node = self.node
        return index in node.gpus_allocated if node.gpus_allocated else index < node.gpus_used


@dataclass(frozen=True)
class PartitionGroup:
    """A partition and its nodes; a node of several partitions is listed in the first of them."""

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
    first = min(whole(request.GET.get("from")) or 0, max(0, len(wanted) - 1))
    page = wanted[first : first + NODES_PER_PAGE]
    jobs_by_node = visibility.allocations_on(user, (node.name for node in page))
    jobs = QueueSearch().counts(user)
    damage = damaged_gpus.by_node()
    lead, more = headline(everything, damage)
    context = {
        "section": "nodes",
        "fragment": is_fragment(request),
        "stale": stale_text(Reading.Part.NODES, now),
        "headline": (lead, f"{more} {unseen_jobs(user).text}".strip()),
        "facts": facts(everything, jobs.get("pending", 0), jobs.get("running", 0)),
        "groups": grouped(
            [NodeRow(node, jobs_by_node[node.name], damage.get(node.name, {})) for node in page], partition
        ),
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
        "before": max(0, first - NODES_PER_PAGE) if first else None,
        "after": first + NODES_PER_PAGE if first + NODES_PER_PAGE < len(wanted) else None,
        "read": Reading.objects.filter(part=Reading.Part.NODES).values_list("read_at", flat=True).first(),
    }
    return vary_on_fragment(
        render(request, "nodes/_index.html" if is_fragment(request) else "nodes/index.html", context)
    )


def headline(nodes: list[Node], damage: Mapping[str, Damage]) -> tuple[str, str]:
    """Return the page's lead: what is out of service or broken, or that nothing is; then what is free."""
    if not nodes:
        return "No nodes yet.", "The scheduler is polled within seconds of Vigil’s start."
    out = [node for node in nodes if not node.is_in_service and not node_states.is_standby(node.reason)]
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
    """Return (title, value, context, link) for each key figure."""
    places = countable(nodes)
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
        ("Not schedulable", formatting.count(out), f"of {of_nodes}", "?state=out" if out else ""),
        ("Running", *_counted(running, "job"), f"{queue}?state=running"),
        ("Pending", *_counted(waiting, "job"), f"{queue}?state=pending"),
    ]


def _counted(number: int, singular: str) -> tuple[str, str]:
    """Return the number and its noun apart: ("1", "job"), ("2", "jobs")."""
    value, _, unit = formatting.plural(number, singular).partition(formatting.NBSP)
    return value, unit


def grouped(shown: Iterable[NodeRow], only: str) -> list[PartitionGroup]:
    """Group nodes by partition, the default one first; a node of several partitions is listed in the first of them."""
    partitions = {partition.name: partition for partition in Partition.objects.all()}
    order = {name: place for place, name in enumerate(partitions)}
    groups: dict[str, list[NodeRow]] = {}
    for row in shown:
        names = sorted(row.node.partitions, key=lambda name: (order.get(name, len(order)), name))
        groups.setdefault(only or (names[0] if names else ""), []).append(row)
    places = sorted(groups, key=lambda name: (not name, order.get(name, len(order)), name))
    return [
        PartitionGroup(name, partitions.get(name), groups[name], free_now(s.node for s in groups[name]))
        for name in places
    ]


def _matches(node: Node, partition: str, text: str, state: str) -> bool:
    if partition and partition not in node.partitions:
        return False
    if state and (node.takes_jobs if state == "out" else not node_states.is_in_state(node.state, state)):
        return False
    where = " ".join((node.name, node.reason, node.gpu_text, *node.features)).lower()
    return all(word in where for word in text.lower().split())
