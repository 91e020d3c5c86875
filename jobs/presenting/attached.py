"""What is known of a job that Vigil did not submit, in words for its page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jobs.models import Job


_WORDS = {
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
    return [*_said(job), *_asked(job.spec.get("resources") or {})] if job.is_attached else []


def _said(job: Job) -> Iterator[tuple[str, str]]:
    for name, title in (("command", "Command"), ("directory", "In")):
        if value := job.spec.get(name):
            yield title, str(value)


def _asked(told: dict[str, object]) -> Iterator[tuple[str, str]]:
    if not told:
        return
    parts = [
        f"{told['gpus_per_node']} {told.get('gpu_type', '')} GPUs".replace("  ", " ")
        if told.get("gpus_per_node")
        else "",
        f"{told['cpus_per_node']} CPUs" if told.get("cpus_per_node") else "",
        f"{told['memory_gib']:g} GiB" if told.get("memory_gib") else "",
    ]
    yield "Nodes", f"{told['nodes']}, each with {', '.join(filter(None, parts))}" if any(parts) else f"{told['nodes']}"
    for name, title in _WORDS.items():
        if value := told.get(name):
            yield title, str(value)
