"""Find the nodes that a job may run on, by its partition, GPU type, features and excluded nodes."""

from __future__ import annotations

from jobs.errors import Problem
from jobs.spec import JobSpec
from nodes.models import Node, Partition
from nodes.scheduling import features, gpu_types

MAX_NAMED = 12


def eligible(spec: JobSpec, nodes: list[Node]) -> tuple[list[Node], Problem | None]:
    """Return the nodes of the requested partition, GPU type and features; or the problem that leaves none.

    An unknown partition or type is reported elsewhere (names): then no node is eligible, without a problem.
    """
    resources = spec.resources
    fitting = _in_partition(resources.partition, nodes)
    if resources.gpu_type and resources.gpus_per_node and fitting:
        if not any(gpu_types.has(node, resources.gpu_type) for node in nodes):
            return [], None  # reported as an unknown name
        types = gpu_types.names(fitting)
        fitting = [node for node in fitting if gpu_types.has(node, resources.gpu_type)]
        if not fitting and types:
            message = (
                f"No node that the job may use has GPUs of type {resources.gpu_type}. There are: {', '.join(types)}."
            )
            return [], Problem("resources.gpu_type", message)
    ways = features.read(resources.constraint)
    if resources.constraint and fitting and ways is not None:
        there = sorted({feature for node in fitting for feature in node.features})
        fitting = [node for node in fitting if any(features.holds(way.every, node.features) for way in ways)]
        if not fitting:
            existing = f"There are: {', '.join(there[:MAX_NAMED])}." if there else "None has any feature."
            message = f"No node that the job may use has the features {resources.constraint}. {existing}"
            return [], Problem("resources.constraint", message)
    return fitting, None


def _in_partition(name: str, nodes: list[Node]) -> list[Node]:
    """Return the nodes of the requested partition, else of the default one; all nodes if there is no known default."""
    default = Partition.objects.reported().filter(is_default=True)
    names = set(name.split(",") if name else default.values_list("name", flat=True))
    return [node for node in nodes if not names.isdisjoint(node.partitions)] if names else nodes
