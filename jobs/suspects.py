"""Nodes that were to blame for the end of a job's attempts: its next ones are kept from them for a day.

Which they are is decided with what follows the end (jobs.following.policy). A trainer's own word names one by an event
(training.guards); nothing of it is believed but a node that the attempt ran on, and no other job is kept from it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

from django.utils import timezone

from jobs.eligible import eligible
from jobs.models import Attempt, Event, Job
from jobs.spec import JobSpec
from nodes.models import Node, NodeOrder

CAUSE, EVENT = "corruption", "guard.corruption"
KEPT = timedelta(hours=24)
PART = 10
"""At most one in so many of the partition's nodes is kept from a job, and at least one."""


@dataclass(frozen=True)
class Finding:
    """What the newest such event says."""

    node: str
    """ "": which one cannot be told."""
    is_intact: bool
    """The weights were still right, so the newest checkpoint is."""
    clean_step: int


def finding(attempt: Attempt) -> Finding | None:
    event = Event.objects.filter(attempt=attempt, kind=EVENT).order_by("-id").first()
    if event is None:
        return None
    node, clean = event.data.get("node"), event.data.get("clean_step")
    return Finding(
        node=node if isinstance(node, str) and node in attempt.nodes else "",
        is_intact=event.data.get("intact") is True,
        clean_step=clean if type(clean) is int else 0,
    )


@dataclass(frozen=True)
class Others:
    """The nodes that a job may run on, as far as the scheduler has told of them, and how to do without some."""

    spec: JobSpec
    nodes: Sequence[Node]

    @classmethod
    def of(cls, job: Job) -> Self:
        spec = JobSpec.parse(job.spec)
        told = list(
            Node.objects.only("name", "partitions", "plays_many", "gpu_type", "gpus_by_type", "features", "gpus")
        )
        found, _ = eligible(spec, told)
        return cls(spec, [node for node in found if node.name not in spec.resources.exclude_nodes])

    def at_most(self, blamed: Iterable[str]) -> list[str]:
        """As many of them, the first first, as one job may be kept from."""
        return list(dict.fromkeys(blamed))[: max(1, len(self.nodes) // PART)]

    def are_enough(self, without: Collection[str]) -> bool:
        """Where nothing is known of the nodes, the scheduler will say."""
        if any(node.plays_many for node in self.nodes):
            return False
        if not set(without).isdisjoint(self.spec.resources.require_nodes):
            return False
        left = sum(node.name not in without for node in self.nodes)
        return not self.nodes or left >= self.spec.resources.least_allocated


def blamed(job: Job, *, before: int) -> list[str]:
    """Nodes that the attempts below this number blamed within the last day, the latest first.

    One that was put back into service since then has been seen to.
    """
    ended = Attempt.objects.filter(job=job, number__lt=before, ended_at__gt=timezone.now() - KEPT)
    rows = list(ended.exclude(blamed_nodes=[]).order_by("-number").values_list("blamed_nodes", "ended_at"))
    if not rows:
        return []
    named = {node for nodes, _ in rows for node in nodes}
    back = NodeOrder.objects.filter(node__in=named, action=NodeOrder.Action.UNDRAIN, state=NodeOrder.State.DONE)
    since = {node: at for node, at in back.order_by("ended_at").values_list("node", "ended_at") if at is not None}
    return [node for nodes, at in rows for node in nodes if at is None or since.get(node, at) <= at]


def kept_from(job: Job, *, before: int) -> list[str]:
    """The nodes that the attempt of this number is kept from."""
    found = blamed(job, before=before)
    return Others.of(job).at_most(found) if found else []


def without(spec: JobSpec, attempt: Attempt) -> JobSpec:
    """What this attempt of the job asks for: the specification, less the nodes that it is kept from."""
    asked = spec.resources.exclude_nodes
    more = [node for node in attempt.excluded_nodes if node not in asked]
    if not more:
        return spec
    return spec.model_copy(
        update={"resources": spec.resources.model_copy(update={"exclude_nodes": [*asked, *more]})},
    )
