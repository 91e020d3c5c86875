"""Describe a job that Vigil did not submit, for its page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_TITLES = {
    "partition": "Partition",
    "account": "Account",
    "qos": "QOS",
    "reservation": "Reservation",
    "constraint": "Node features",
    "licenses": "Licenses",
    "time_limit": "Time limit",
}


def facts(spec: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the job's command and directory, as it reported them, and the resources that it requested."""
    return [*_command_facts(spec), *_resource_facts(spec.get("resources") or {})]


def _command_facts(spec: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, title in (("command", "Command"), ("directory", "Directory")):
        if value := spec.get(name):
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
