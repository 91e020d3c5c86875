"""What nodes have, beside what a spec asks for.

Nodes are those that the last tick wrote down: no scheduler is asked inside a request.
"""

from __future__ import annotations

from collections.abc import Iterator

from jobs.errors import Problem
from jobs.spec import JobSpec
from nodes.models import Node, Partition
from nodes.scheduling import features
from nodes.scheduling.capacity import Room

MOST_NAMED = 12


def misfits(spec: JobSpec) -> list[Problem]:
    """What the spec asks for that no node has, however long it waits. Empty while no node is known yet."""
    nodes = list(Node.objects.told())  # those out of service too: somebody will mend them
    if not nodes:
        return []
    count = spec.resources.least_allocated
    if nodes[0].plays_many:
        return list(shortfalls(spec, room_of(nodes[0]), times=count, where=f"{nodes[0].name} has"))
    eligible, problem = _eligible(spec, nodes)
    if problem is not None:
        return [problem]
    fitting = [node for node in eligible if not list(shortfalls(spec, room_of(node), times=1, where=""))]
    if eligible and not fitting:
        largest = max(eligible, key=lambda node: (node.gpus, node.cpus))
        which = "the largest node" if len(eligible) == len(nodes) else "the largest node that would do"
        return list(shortfalls(spec, room_of(largest), times=1, where=f"{which}, {largest.name}, has"))
    if eligible and count > len(fitting):
        more = f"{count} nodes are more than the {len(fitting)} that have what is asked for."
        return [Problem("resources.nodes", f"{more} Take at most {len(fitting)}.")]
    return []


def _eligible(spec: JobSpec, nodes: list[Node]) -> tuple[list[Node], Problem | None]:
    """Nodes of the partition, GPU type and features that are asked for; or which of these leaves none.

    An unknown partition or type is told elsewhere (names): then no node is eligible, and nothing is said here.
    """
    asked = spec.resources
    found = _in_partition(asked.partition, nodes)
    if asked.gpu_type and asked.gpus_per_node and found:
        if asked.gpu_type.lower() not in {node.gpu_type.lower() for node in nodes}:
            return [], None  # told as an unknown name
        types = sorted({node.gpu_type for node in found if node.gpu_type})
        found = [node for node in found if node.gpu_type.lower() == asked.gpu_type.lower()]
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


def shortfalls(spec: JobSpec, room: Room, *, times: int, where: str) -> Iterator[Problem]:
    """Each thing of which more is asked for than there is; `times`: nodes played by one machine."""
    asked = spec.resources
    over = f" × {times} nodes" if times > 1 else ""
    if asked.gpus_per_node * times > room.gpus:
        hint = "Write 0 to run on CPUs." if room.gpus == 0 else f"Take at most {room.gpus // times}."
        message = f"{asked.gpus_per_node} GPUs{over} are asked for, {where} {room.gpus or 'none'}. {hint}"
        yield Problem("resources.gpus_per_node", message)
    elif asked.cpus_per_node * times > room.cpus:
        field = (
            "resources.ranks_per_node"
            if asked.cpus_per_rank == 1 and not asked.gpus_per_node
            else "resources.cpus_per_rank"
        )
        each = f"{asked.local_world_size} ranks × {asked.cpus_per_rank} CPUs{over}"
        message = f"{each} are {asked.cpus_per_node * times} CPUs, {where} {room.cpus}. Take fewer."
        yield Problem(field, message)
    if (memory := asked.memory_mib_per_node) and room.memory_mib and memory * times > room.memory_mib:
        most = room.memory_mib / 1024 / times
        yield Problem(
            "resources.memory_gib",
            f"{asked.memory_gib:g} GiB{over} are asked for, {where} {room.memory_mib / 1024:.1f}. "
            f"Take at most {most:.1f}.",
        )


def room_of(node: Node) -> Room:
    return Room(node.cpus, node.gpus, node.memory_mib)
