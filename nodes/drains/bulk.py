"""Drain many nodes for one reason: what that would hit, and the orders."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from django.db import transaction

from nodes.cluster import drain
from nodes.models import Node, NodeOrder, Partition, QueuedJob
from nodes.schedulers.cluster import ALLOCATED_STATES
from portal.bulk import give_way
from portal.models import User
from vigil_core import host_expression

Action = NodeOrder.Action
AT_ONCE = 20
"""Orders per transaction, so that other writers do not wait long."""


class UnknownNodes(ValueError):
    """Raised if the scheduler does not know some of the nodes."""

    def __init__(self, names: Sequence[str]) -> None:
        shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
        super().__init__(f"The scheduler does not know {shown}.")


@dataclass(frozen=True)
class PartitionShare:
    """How much of a partition would be out of service: `hit` of its nodes by this drain, `out` in all."""

    name: str
    nodes: int
    hit: int
    out: int


@dataclass(frozen=True)
class DrainPreview:
    """What a drain of these nodes would hit."""

    nodes: tuple[Node, ...]
    out_already: tuple[Node, ...]
    """Those that are out of service: somebody else's drain is not replaced unless requested."""
    jobs: int
    """Running jobs: they continue."""
    users: tuple[str, ...]
    gpus: int
    """GPUs that take no new jobs afterwards, and do now."""
    cluster_gpus: int
    partitions: tuple[PartitionShare, ...]

    @property
    def reasons(self) -> dict[str, str]:
        """Return by node the reasons that the drain could replace, as `drain_all` takes them."""
        return {node.name: node.reason for node in self.out_already}


@dataclass(frozen=True)
class BulkOutcome:
    """Describes what a bulk order did about one node: an order, or why there is none."""

    node: str
    order: NodeOrder | None
    problem: str = ""
    is_in_service: bool = False
    """Nothing was to be returned."""
    is_by_another: bool = False
    """Somebody else took it out of service, for a reason that was not to be replaced."""


@dataclass(frozen=True)
class ReplacedReasons:
    """Selects the reasons of other people that an order replaces: those `by_node` that were seen, else all or none."""

    every: bool = False
    by_node: Mapping[str, str] | None = None

    def reason_of(self, node: Node) -> str | None:
        if self.by_node is not None:
            return self.by_node.get(node.name)
        return node.reason if self.every else None


def find_nodes(expression: str) -> list[Node]:
    """Return the nodes of an expression. Raises BadHostExpression and UnknownNodes."""
    names = host_expression.expand(expression)
    found = {node.name: node for node in Node.objects.reported().filter(name__in=names)}
    if missing := [name for name in names if name not in found]:
        raise UnknownNodes(missing)
    return [found[name] for name in names]


def preview(expression: str) -> DrainPreview:
    """Return what a drain would hit. Raises BadHostExpression and UnknownNodes."""
    nodes = find_nodes(expression)
    names = {node.name for node in nodes}
    everything = list(Node.objects.reported().only("name", "state", "partitions", "gpus"))
    jobs, users = _jobs_on(names)
    return DrainPreview(
        nodes=tuple(nodes),
        out_already=tuple(node for node in nodes if not node.is_in_service),
        jobs=jobs,
        users=users,
        gpus=sum(node.gpus for node in nodes if node.is_in_service),
        cluster_gpus=sum(node.gpus for node in everything if node.is_in_service),
        partitions=_shares(everything, names),
    )


def drain_all(
    user: User, expression: str, reason: str, *, replace: bool = False, replaces: Mapping[str, str] | None = None
) -> list[BulkOutcome]:
    """Order to drain every node of the expression. Raises BadHostExpression and UnknownNodes before any order.

    Drains of others stay, but for those whose reason `replaces` has by node, as a preview showed it. `replace` replaces
    all of them, also reasons that nobody has seen.
    """
    chosen = ReplacedReasons(replace, replaces)
    return for_each(find_nodes(expression), lambda node: request(user, node, Action.DRAIN, reason, chosen))


def for_each(nodes: Sequence[Node], order: Callable[[Node], BulkOutcome]) -> list[BulkOutcome]:
    """Order something for every node, in short transactions; return the outcomes in the order of the nodes.

    Each order locks its node until its transaction ends: always by name, or two people would wait for each other.
    """
    outcomes: dict[str, BulkOutcome] = {}
    by_name = sorted(nodes, key=lambda node: node.name)
    for start in range(0, len(by_name), AT_ONCE):
        began = time.monotonic()
        with transaction.atomic():
            outcomes |= {node.name: order(node) for node in by_name[start : start + AT_ONCE]}
        if start + AT_ONCE < len(by_name):
            give_way(began)
    return [outcomes[node.name] for node in nodes]


def request(user: User, node: Node, action: NodeOrder.Action, reason: str, replaced: ReplacedReasons) -> BulkOutcome:
    """Order it for one node, and return what became of it."""
    try:
        order = drain.request_order(user, node, action, reason, replaces=replaced.reason_of(node))
    except drain.NotOrdered as error:
        return BulkOutcome(node.name, None, str(error), is_by_another=isinstance(error, drain.DrainedByAnother))
    return BulkOutcome(node.name, order)


def _jobs_on(names: set[str]) -> tuple[int, tuple[str, ...]]:
    jobs = QueuedJob.objects.filter(state__in=ALLOCATED_STATES, is_made_up=False).order_by()
    users = [user for user, nodes in jobs.values_list("user", "nodes") if not names.isdisjoint(nodes)]
    return len(users), tuple(sorted(set(users)))


def _shares(everything: Sequence[Node], names: set[str]) -> tuple[PartitionShare, ...]:
    total, hit, out = Counter[str](), Counter[str](), Counter[str]()
    for node in everything:
        for partition in node.partitions:
            total[partition] += 1
            hit[partition] += node.name in names
            out[partition] += node.name in names or not node.is_in_service
    known = Partition.objects.reported().values_list("name", flat=True)
    return tuple(PartitionShare(name, total[name], hit[name], out[name]) for name in known if hit[name])
