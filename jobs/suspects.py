"""Nodes that were to blame for the end of a job's attempts: its next ones are kept from them for a day.

Which they are is decided with what follows the end (jobs.following.policy). A trainer's own word names one by an event
(training.guards); nothing of it is believed but a node that the attempt ran on, and no other job is kept from it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain

from django.utils import timezone

from jobs.models import Attempt, Event, Job
from jobs.spec import JobSpec
from nodes.models import Node

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


def kept_from(job: Job, *, before: int, also: Sequence[str] = ()) -> list[str]:
    """The nodes that the attempt of this number is kept from: `also`, then those blamed within the last day."""
    ended = Attempt.objects.filter(job=job, number__lt=before, ended_at__gt=timezone.now() - KEPT)
    rows = ended.exclude(blamed_nodes=[]).order_by("-number").values_list("blamed_nodes", flat=True)
    return at_most(job, [*also, *chain.from_iterable(rows)])


def at_most(job: Job, nodes: Sequence[str]) -> list[str]:
    """As many of the nodes, the first first, as one job may be kept from."""
    named = list(dict.fromkeys(nodes))
    return named[: max(1, len(_nodes(JobSpec.parse(job.spec).resources.partition)) // PART)] if named else []


def without(spec: JobSpec, attempt: Attempt) -> JobSpec:
    """What this attempt of the job asks for: the specification, less the nodes that it is kept from."""
    asked = spec.resources.exclude_nodes
    more = [node for node in attempt.excluded_nodes if node not in asked]
    if not more:
        return spec
    return spec.model_copy(
        update={"resources": spec.resources.model_copy(update={"exclude_nodes": [*asked, *more]})},
    )


def has_others(spec: JobSpec, without: list[str]) -> bool:
    """Whether enough nodes are left to run on; where nothing is known of the nodes, the scheduler will say."""
    nodes = _nodes(spec.resources.partition)
    if any(node.plays_many for node in nodes):
        return False
    if set(without) & set(spec.resources.require_nodes):
        return False
    return not nodes or len([node for node in nodes if node.name not in without]) >= spec.resources.least_allocated


def _nodes(partition: str) -> list[Node]:
    nodes = Node.objects.only("name", "partitions", "plays_many")
    return [node for node in nodes if not partition or partition in node.partitions]
