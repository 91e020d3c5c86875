"""Nodes that a job's own trainer has named as broken: its next attempts are kept from them for a day.

What names them is an event of an attempt that ended by it (training.guards); nothing of it is believed but a node that
the attempt ran on.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from django.utils import timezone

from jobs.models import Attempt, Event
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


def kept_from(job_id: int, spec: JobSpec, *, before: int) -> list[str]:
    """The nodes that the attempt of this number is kept from: those named within the last day, newest first."""
    ended = Attempt.objects.filter(job_id=job_id, number__lt=before, cause=CAUSE, ended_at__gt=timezone.now() - KEPT)
    findings = [finding(attempt) for attempt in ended.order_by("-number")]
    named = list(dict.fromkeys(found.node for found in findings if found is not None and found.node))
    return named[: max(1, len(_nodes(spec.resources.partition)) // PART)] if named else []


def without(spec: JobSpec, attempt: Attempt) -> JobSpec:
    """What this attempt of the job asks for: the specification, less the nodes that it is kept from."""
    asked = spec.resources.exclude_nodes
    more = [node for node in kept_from(attempt.job_id, spec, before=attempt.number) if node not in asked]
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
    return not nodes or len([node for node in nodes if node.name not in without]) >= spec.resources.min_nodes


def _nodes(partition: str) -> list[Node]:
    nodes = Node.objects.only("name", "partitions", "plays_many")
    return [node for node in nodes if not partition or partition in node.partitions]
