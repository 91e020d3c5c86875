"""The nodes that a job may run on, by its partition, GPU type, features and the nodes that it leaves out."""

from __future__ import annotations

from jobs.errors import Problem
from jobs.spec import JobSpec
from nodes.models import Node, Partition
from nodes.scheduling import features, gpu_types

MOST_NAMED = 12


def eligible(spec: JobSpec, nodes: list[Node]) -> tuple[list[Node], Problem | None]:
    """Nodes of the partition, GPU type and features that are asked for; or which of these leaves none.

    An unknown partition or type is told elsewhere (names): then no node is eligible, and nothing is said here.
    """
    asked = spec.resources
    found = _in_partition(asked.partition, nodes)
    if asked.gpu_type and asked.gpus_per_node and found:
        if not any(gpu_types.has(node, asked.gpu_type) for node in nodes):
            return [], None  # told as an unknown name
        types = gpu_types.names(found)
        found = [node for node in found if gpu_types.has(node, asked.gpu_type)]
        if not found and types:
            message = f"No node that the job may use has GPUs of type {asked.gpu_type}. There are: {', '.join(types)}."
            return [], Problem("resources.gpu_type", message)
    ways = features.read(asked.constraint)
    if asked.constraint and found and ways is not None:
        there = sorted({feature for node in found for feature in node.features})
        found = [node for node in found if any(features.holds(way.every, node.features) for way in ways)]
        if not found:
            known = f"There are: {', '.join(there[:MOST_NAMED])}." if there else "None has any feature."
            message = f"No node that the job may use has the features {asked.constraint}. {known}"
            return [], Problem("resources.constraint", message)
    return found, None


def _in_partition(name: str, nodes: list[Node]) -> list[Node]:
    """The nodes of the partition that is asked for, else of the default one; all where none is known to be that."""
    default = Partition.objects.told().filter(is_default=True)
    names = set(name.split(",") if name else default.values_list("name", flat=True))
    return [node for node in nodes if not names.isdisjoint(node.partitions)] if names else nodes
