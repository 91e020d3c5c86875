"""Warn in the dry run of nodes whose NVLinks do not reach as far as tensor parallelism needs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from jobs.spec import JobSpec
from nodes.models import Agent, Node, Partition
from training.config.run_config import RunConfig
from vigil_core import formatting

AXIS = "tp"
MAX_NODES, MAX_GPUS = 200, 64
MAX_NAMED = 3


def warnings(spec: JobSpec) -> list[str]:
    """Return a sentence such as "tp = 8 needs 8-way NVLink; dgx-03 has 4 + 4."; none without agents' measurements."""
    degree = spec.run.mesh.get(AXIS, 1) if isinstance(spec.run, RunConfig) else 1
    if degree < 2 or spec.resources.gpus_per_node < 2:
        return []
    short: dict[str, list[str]] = {}
    agents = Agent.objects.filter(node__in=_usable(spec)).order_by("node")
    for node, matrix in agents.values_list("node", "facts__topology")[:MAX_NODES]:
        islands = nvlink_islands(matrix)
        if islands and islands[0] < degree:
            short.setdefault(_text(islands), []).append(node)
    needs = f"mesh.{AXIS} = {degree} needs {degree}-way NVLink"
    return [
        f"{needs}; {formatting.listed(names, MAX_NAMED)} {'has' if len(names) == 1 else 'have'} {text}."
        for text, names in short.items()
    ]


def nvlink_islands(matrix: object) -> list[int]:
    """Return how many GPUs each group that NVLinks connect has, the largest first; [] if that was not reported.

    `matrix`: in nvidia-smi's terms, [a][b] is X, NV18, PIX, SYS …
    """
    if not isinstance(matrix, list) or not 1 < len(matrix) <= MAX_GPUS:
        return []
    if not all(isinstance(row, list) and len(row) == len(matrix) for row in matrix):
        return []
    group = list(range(len(matrix)))
    for first, row in enumerate(matrix):
        for second, link in enumerate(row):
            if isinstance(link, str) and link.startswith("NV"):
                target, source = group[first], group[second]
                group = [target if number == source else number for number in group]
    return sorted(Counter(group).values(), reverse=True)


def _text(islands: Sequence[int]) -> str:
    return "no NVLink" if islands[0] == 1 else " + ".join(map(str, islands))


def _usable(spec: JobSpec) -> list[str]:
    """Return the nodes that the job might get: those that it requires, else its partition's, else all."""
    if spec.resources.require_nodes:
        return list(spec.resources.require_nodes)
    partition = Partition.objects.filter(name=spec.resources.partition).first()
    names = list(partition.nodes) if partition is not None else list(Node.objects.values_list("name", flat=True))
    return sorted(set(names) - set(spec.resources.exclude_nodes))[:MAX_NODES]
