"""Describe a job that Vigil did not submit, for its page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jobs.models import Job


_TITLES = {
    "partition": "Partition",
    "account": "Account",
    "qos": "QOS",
    "reservation": "Reservation",
    "constraint": "Node features",
    "licenses": "Licences",
    "time_limit": "Time limit",
}


def facts(job: Job) -> list[tuple[str, str]]:
    """Its command and folder, as it said; and what it asked Slurm for."""
    return [*_command_facts(job), *_resource_facts(job.spec.get("resources") or {})] if job.is_attached else []


def _command_facts(job: Job) -> Iterator[tuple[str, str]]:
    for name, title in (("command", "Command"), ("directory", "In")):
        if value := job.spec.get(name):
            yield title, str(value)


def _resource_facts(resources: dict[str, object]) -> Iterator[tuple[str, str]]:
    if not resources:
        return
    parts = [
        f"{resources['gpus_per_node']} {resources.get('gpu_type', '')} GPUs".replace("  ", " ")
        if resources.get("gpus_per_node")
        else "",
        f"{resources['cpus_per_node']} CPUs" if resources.get("cpus_per_node") else "",
        f"{resources['memory_gib']:g} GiB" if resources.get("memory_gib") else "",
    ]
    yield (
        "Nodes",
        f"{resources['nodes']}, each with {', '.join(filter(None, parts))}" if any(parts) else f"{resources['nodes']}",
    )
    for name, title in _TITLES.items():
        if value := resources.get(name):
            yield title, str(value)
