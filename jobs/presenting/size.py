"""Describe how large a job is by its specification: ranks, GPUs, nodes and time limit. Pure."""

from __future__ import annotations

from typing import Any

from jobs.spec import seconds_of
from vigil_core import formatting

ATTACHED = "attached"  # the kind of a job that Vigil did not submit


def limit_seconds(spec: dict[str, Any]) -> int | None:
    """Return the time limit in seconds; None if the spec has no readable limit."""
    try:
        return seconds_of(str(spec["resources"]["time_limit"]))
    except (KeyError, TypeError, ValueError):
        return None


def ranks_and_nodes(spec: dict[str, Any]) -> tuple[int, int, bool]:
    """Return the ranks at the smallest number of nodes, that number of nodes, and whether a rank is a GPU."""
    resources = spec.get("resources") or {}
    nodes = int(str(resources.get("nodes", 1)).split(":")[0])
    gpus = int(resources.get("gpus_per_node") or 0)
    return nodes * (gpus or int(resources.get("ranks_per_node") or 1)), nodes, bool(gpus)


def is_elastic(spec: dict[str, Any]) -> bool:
    return ":" in str((spec.get("resources") or {}).get("nodes", 1))


def has_ranks(spec: dict[str, Any]) -> bool:
    """Return whether Vigil starts the job's ranks, and so knows how many there are."""
    return spec.get("kind") != ATTACHED


def wants(spec: dict[str, Any]) -> str:
    """Return what the job requests: "2 ranks on 1 node", "32 GPUs on 4 nodes"; "2 nodes" if its ranks are unknown."""
    ranks, nodes, gpus = ranks_and_nodes(spec)
    if not gpus and not has_ranks(spec):
        return formatting.plural(nodes, "node") if spec.get("resources") else ""
    return f"{formatting.plural(ranks, 'GPU' if gpus else 'rank')} on {formatting.plural(nodes, 'node')}"


def size(spec: dict[str, Any]) -> str:
    """Return the job's size for a table cell: "4 × 8 GPUs", "2 ranks"."""
    ranks, nodes, gpus = ranks_and_nodes(spec)
    if not gpus and not has_ranks(spec):
        return wants(spec)
    unit = "GPU" if gpus else "rank"
    return f"{nodes} × {formatting.plural(ranks // nodes, unit)}" if nodes > 1 else formatting.plural(ranks, unit)
