"""Exclude nodes from a job's attempts: those blamed for the end of earlier ones, for a day, and unhealthy ones.

Which nodes are blamed is decided with what follows the end (jobs.following.decisions). A trainer's event may name one
(training.guards): it is only trusted if the attempt ran on that node, and excludes it for no other job.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

from django.utils import timezone

from jobs.eligible_nodes import eligible
from jobs.models import Attempt, Event, Job
from jobs.spec import JobSpec
from nodes.models import HealthEntry, Node, NodeOrder
from nodes.scheduling import node_states

CAUSE, EVENT = "corruption", "guard.corruption"
EXCLUDED_FOR = timedelta(hours=24)
MAX_UNHEALTHY = 1_000
FRACTION = 10
"""At most one in this many of the partition's nodes is excluded from a job, but at least one."""


@dataclass(frozen=True)
class CorruptionFinding:
    """The content of the newest corruption event."""

    node: str
    """ "": unknown."""
    is_intact: bool
    """The weights were still right, so the newest checkpoint is."""
    clean_step: int


def corruption_finding(attempt: Attempt) -> CorruptionFinding | None:
    event = Event.objects.filter(attempt=attempt, kind=EVENT).order_by("-id").first()
    if event is None:
        return None
    node, clean = event.data.get("node"), event.data.get("clean_step")
    return CorruptionFinding(
        node=node if isinstance(node, str) and node in attempt.nodes else "",
        is_intact=event.data.get("intact") is True,
        clean_step=clean if type(clean) is int else 0,
    )


@dataclass(frozen=True)
class EligibleNodes:
    """The nodes that a job may run on, as far as the scheduler reports them, and how many can be excluded."""

    spec: JobSpec
    nodes: Sequence[Node]

    @classmethod
    def for_job(cls, job: Job) -> Self:
        return cls.for_spec(JobSpec.parse(job.spec))

    @classmethod
    def for_spec(cls, spec: JobSpec) -> Self:
        nodes = list(
            Node.objects.only(
                "name", "state", "partitions", "plays_many", "gpu_type", "gpus_by_type", "features", "gpus"
            )
        )
        found, _ = eligible(spec, nodes)
        return cls(spec, [node for node in found if node.name not in spec.resources.exclude_nodes])

    def at_most(self, blamed: Iterable[str]) -> list[str]:
        """Return as many of them, in their order, as one job may exclude."""
        return list(dict.fromkeys(blamed))[: max(1, len(self.nodes) // FRACTION)]

    def are_enough(self, without: Collection[str]) -> bool:
        """Return whether enough nodes are left; True if nothing is known of the nodes, as the scheduler will decide."""
        if any(node.plays_many for node in self.nodes):
            return False
        if not set(without).isdisjoint(self.spec.resources.require_nodes):
            return False
        left = sum(node.name not in without for node in self.nodes)
        return not self.nodes or left >= self.spec.resources.least_allocated

    def dispensable(self, unhealthy: Iterable[str], without: Sequence[str]) -> list[str]:
        """Return as many of the unhealthy nodes, in their order, as the job can do without besides `without`.

        Enough nodes that are in service must be left: a job on a doubtful node is better than one that waits.
        """
        names = {node.name for node in self.nodes}
        closed = {node.name for node in self.nodes if not node_states.is_in_service(node.state)}
        dispensable_nodes: list[str] = []
        for name in unhealthy:
            more = [*without, *dispensable_nodes, name]
            if (
                name in names
                and name not in without
                and self.at_most(more) == more
                and self.are_enough({*more, *closed})
            ):
                dispensable_nodes.append(name)
        return dispensable_nodes


def blamed(job: Job, *, before: int) -> list[str]:
    """Return nodes that earlier attempts blamed within the last day, the latest first.

    A node that was returned to service since then is not blamed any more.
    """
    ended = Attempt.objects.filter(job=job, number__lt=before, ended_at__gt=timezone.now() - EXCLUDED_FOR)
    rows = list(ended.exclude(blamed_nodes=[]).order_by("-number").values_list("blamed_nodes", "ended_at"))
    if not rows:
        return []
    named = {node for nodes, _ in rows for node in nodes}
    back = NodeOrder.objects.filter(node__in=named, action=NodeOrder.Action.UNDRAIN, state=NodeOrder.State.DONE)
    since = {node: at for node, at in back.order_by("ended_at").values_list("node", "ended_at") if at is not None}
    return [node for nodes, at in rows for node in nodes if at is None or since.get(node, at) <= at]


def excluded_nodes(job: Job, *, before: int) -> list[str]:
    """Return the nodes that the attempt of this number excludes: blamed ones, and those that a health rule excludes."""
    names, unhealthy = blamed(job, before=before), excluding_findings()
    if not names and not unhealthy:
        return []
    nodes = EligibleNodes.for_job(job)
    excluded = nodes.at_most(names)
    return [*excluded, *nodes.dispensable(unhealthy, excluded)]


def excluding_findings() -> dict[str, str]:
    """Return the nodes that a health rule excludes with what it found, the most serious and oldest first."""
    rows = HealthEntry.objects.excluding().exclude(node="").order_by("opened_at")
    by_age = rows.values_list("severity", "node", "title")[:MAX_UNHEALTHY]
    found: dict[str, str] = {}
    for _, node, title in sorted(by_age, key=lambda row: row[0] not in ("critical", "fatal")):
        found.setdefault(node, title)
    return found


def avoided_nodes(spec: JobSpec) -> dict[str, str]:
    """Return the nodes that a first attempt of this specification would avoid, and why."""
    unhealthy = excluding_findings()
    chosen = EligibleNodes.for_spec(spec).dispensable(unhealthy, ()) if unhealthy else []
    return {node: unhealthy[node] for node in chosen}


def exclusion_reasons(attempt: Attempt) -> dict[str, str]:
    """Return the nodes that an attempt was submitted without, and why."""
    if not attempt.excluded_nodes:
        return {}
    unhealthy, named = excluding_findings(), blamed(attempt.job, before=attempt.number)
    return {
        node: "An earlier attempt failed there" if node in named else unhealthy.get(node, "It was not healthy")
        for node in attempt.excluded_nodes
    }


def without_nodes(spec: JobSpec, nodes: Iterable[str]) -> JobSpec:
    """Return the specification with these nodes excluded as well."""
    excluded = spec.resources.exclude_nodes
    more = [node for node in nodes if node not in excluded]
    if not more:
        return spec
    return spec.model_copy(
        update={"resources": spec.resources.model_copy(update={"exclude_nodes": [*excluded, *more]})},
    )


def with_exclusions(spec: JobSpec, attempt: Attempt) -> JobSpec:
    """Return the specification with the nodes that this attempt excludes."""
    return without_nodes(spec, attempt.excluded_nodes)
