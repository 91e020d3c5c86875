"""Name the series from which the fields of GPUs, nodes and ports come, and how a stored value becomes a field's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nodes.health.progress import Subject
from nodes.health.rules.condition import FieldValue
from nodes.models import Agent, Gpu
from nodes.telemetry.fields import gpu_owner, host_owner
from portal.models import Series
from portal.series.store import Owner
from vigil_core import untrusted

STORED_FIELDS: Mapping[str, frozenset[str]] = {
    "gpu_samples": frozenset({"temperature_c", "margin_c", "throttle", "gpu_percent", "watts"}),
    "host": frozenset({"blocked_processes", "root_free_share", "root_free_mib", "shm_free_share"}),
    "port": frozenset({"is_up", "usually_up"}),
}
"""The signals of which series have a history, with the fields that they tell."""

Convert = Callable[[float], FieldValue]
Fields = Mapping[str, tuple[str, Convert]]
"""The stored fields of a subject: by name the series and how its value becomes the field's."""


@dataclass(frozen=True)
class SampledSubject:
    """A GPU, node or port with the series that a signal's fields come from."""

    subject: Subject
    signal: str
    owner: Owner
    fields: Fields


def sampled_subjects(
    signal: str, agents: Sequence[Agent], gpus: Iterable[Gpu], ports_usually_up: Callable[[str], bool]
) -> Iterator[SampledSubject]:
    """Yield the subjects of one of the signals `gpu_samples`, `host` and `port` on these machines."""
    nodes = {agent.pk: agent.node for agent in agents}
    if signal == "gpu_samples":
        for gpu in gpus:
            subject = Subject(nodes[gpu.agent_id], gpu.uuid)
            yield SampledSubject(subject, signal, gpu_owner(gpu.pk), _gpu_fields(gpu.slowdown_c))
    elif signal == "host":
        for agent in agents:
            yield SampledSubject(Subject(agent.node), signal, host_owner(agent.pk), _host_fields(agent))
    elif signal == "port":
        for agent_id, name in _ports(agents):
            port = name.partition(":")[2]
            usual = ports_usually_up(name)
            fields: Fields = {"is_up": (name, bool), "usually_up": (name, partial(_constant, usual))}
            yield SampledSubject(Subject(nodes[agent_id], item=port[:64]), signal, host_owner(agent_id), fields)


def _gpu_fields(slowdown_c: int | None) -> Fields:
    return {
        "temperature_c": ("temperature_c", float),
        "margin_c": ("temperature_c", partial(_margin, slowdown_c)),
        "throttle": ("throttle", int),
        "gpu_percent": ("gpu_percent", float),
        "watts": ("watts", float),
    }


def _host_fields(agent: Agent) -> Fields:
    """Return the host's fields. Sizes of file systems are those of today: they rarely change."""
    host = agent.newest.get("host") if isinstance(agent.newest, dict) else None
    root, shm = _size(host, "disk_total_mib:/"), _size(host, "shm_total_mib")
    return {
        "blocked_processes": ("blocked_processes", float),
        "root_free_share": ("disk_used_mib:/", partial(_free_share, root)),
        "root_free_mib": ("disk_used_mib:/", partial(_free, root)),
        "shm_free_share": ("shm_used_mib", partial(_free_share, shm)),
    }


def _ports(agents: Sequence[Agent]) -> list[tuple[int, str]]:
    names = Series.objects.filter(
        owner_kind="node", owner_id__in=[agent.pk for agent in agents], name__startswith="ib_up:", column=""
    ).values_list("owner_id", "name")
    return sorted({(owner, name.partition("@")[0]) for owner, name in names})


def _margin(limit: int | None, temperature: float) -> FieldValue:
    return limit - temperature if limit else None


def _free(total: float | None, used: float) -> FieldValue:
    return None if total is None else total - used


def _free_share(total: float | None, used: float) -> FieldValue:
    return max(0.0, 1 - used / total) if total else None


def _constant(value: FieldValue, _: float) -> FieldValue:
    return value


def _size(host: Any, name: str) -> float | None:
    return untrusted.number(host.get(name), 1e15) if isinstance(host, dict) else None


def usually_up() -> Callable[[str], bool]:
    """Return whether a port of this name is active on most machines today: one that is not is not cabled."""
    up: defaultdict[str, list[bool]] = defaultdict(list)
    for newest in Agent.objects.filter(is_made_up=False).values_list("newest", flat=True):
        host = newest.get("host") if isinstance(newest, dict) else None
        for name, value in host.items() if isinstance(host, dict) else ():
            if name.startswith("ib_up:") and isinstance(value, int | float):
                up[name].append(bool(value))
    return lambda name: 2 * sum(up[name]) > len(up[name])
