"""Compare what nodes have with what a spec requests.

Nodes are those that the last tick stored: no scheduler is called inside a request.
"""

from __future__ import annotations

from collections.abc import Iterator

from jobs.eligible_nodes import eligible
from jobs.errors import Problem
from jobs.spec import JobSpec
from nodes.models import Node
from nodes.scheduling import gpu_types
from nodes.scheduling.capacity import FreeCapacity
from vigil_core import formatting


def capacity_problems(spec: JobSpec) -> list[Problem]:
    """Return what the spec requests that no node has, however long it waits. Empty while no node is known yet."""
    nodes = list(Node.objects.reported())  # including those out of service: they will be repaired
    if not nodes:
        return []
    count = spec.resources.least_allocated
    if nodes[0].plays_many:
        return list(shortfalls(spec, room_of(spec, nodes[0]), times=count, where=f"{nodes[0].name} has"))
    allowed, problem = eligible(spec, nodes)
    if problem is not None:
        return [problem]
    fitting = [node for node in allowed if not list(shortfalls(spec, room_of(spec, node), times=1, where=""))]
    if allowed and not fitting:
        largest = max(allowed, key=lambda node: (room_of(spec, node).gpus, node.cpus))
        which = "the largest node" if len(allowed) == len(nodes) else "the largest eligible node"
        return list(shortfalls(spec, room_of(spec, largest), times=1, where=f"{which}, {largest.name}, has"))
    if allowed and count > len(fitting):
        more = f"{count} nodes are more than the {len(fitting)} that fit the request."
        return [Problem("resources.nodes", f"{more} Request at most {len(fitting)}.")]
    return []


def shortfalls(spec: JobSpec, room: FreeCapacity, *, times: int, where: str) -> Iterator[Problem]:
    """Yield each resource of which more is requested than a node has; `times`: nodes played by one machine."""
    resources = spec.resources
    over = f" × {times} nodes" if times > 1 else ""
    if resources.gpus_per_node * times > room.gpus:
        hint = "Write 0 to run on CPUs." if room.gpus == 0 else f"Request at most {room.gpus // times}."
        be = "is" if resources.gpus_per_node * times == 1 else "are"
        kind = f"{resources.gpu_type} " if resources.gpu_type else ""
        gpus = formatting.plural(resources.gpus_per_node, f"{kind}GPU")
        message = f"{gpus}{over} {be} requested, {where} {room.gpus or 'none'}. {hint}"
        yield Problem("resources.gpus_per_node", message)
    elif resources.cpus_per_node * times > room.cpus:
        field = (
            "resources.ranks_per_node"
            if resources.cpus_per_rank == 1 and not resources.gpus_per_node
            else "resources.cpus_per_rank"
        )
        each = f"{resources.local_world_size} ranks × {resources.cpus_per_rank} CPUs{over}"
        message = f"{each} are {resources.cpus_per_node * times} CPUs, {where} {room.cpus}. Request fewer."
        yield Problem(field, message)
    if (memory := resources.memory_mib_per_node) and room.memory_mib and memory * times > room.memory_mib:
        most = room.memory_mib / 1024 / times
        yield Problem(
            "resources.memory_gib",
            f"{resources.memory_gib:g} GiB{over} are requested, {where} {room.memory_mib / 1024:.1f}. "
            f"Request at most {most:.1f}.",
        )


def room_of(spec: JobSpec, node: Node) -> FreeCapacity:
    """Return what the node has for this job: its GPUs of the requested type, or all if the type is unknown."""
    wanted = spec.resources.gpu_type
    gpus = gpu_types.count_of(gpu_types.installed(node), wanted if gpu_types.has(node, wanted) else "")
    return FreeCapacity(node.cpus, gpus, node.memory_mib)
