"""What a machine is: its facts, its GPUs by UUID, where each sits and since when, and their slow counters."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from gpus import health
from nodes.models import Agent, Gpu, GpuPlace, NodeEvent
from portal import untrusted

MOST_GPUS = 1_024  # that one machine ever told of

logger = logging.getLogger(__name__)


def note_facts(agent: Agent, told: dict[str, Any], at: datetime) -> None:
    """The machine's facts, and its GPUs: new ones, moved ones, and those that it tells of no more."""
    agent.facts = cleaned(told)
    there = []
    for place, about in enumerate(_dicts(told.get("gpus"))[:64]):
        uuid = untrusted.name(about.get("uuid"), 96)
        if uuid and (gpu := _note_gpu(agent, uuid, place, about, at)):
            there.append(gpu.pk)
    for gpu in agent.gpus.exclude(pk__in=there).filter(gone_at=None):
        _leave(gpu, at)


def gpu_ids(agent: Agent, uuids: Sequence[str], at: datetime) -> list[int | None]:
    """The rows' ids of these GPUs, in the same order; one that no facts have named gets a row. None: it is not its."""
    known: dict[str, int | None] = dict(
        Gpu.objects.filter(agent=agent, uuid__in=uuids, gone_at=None).values_list("uuid", "pk")
    )
    for place, uuid in enumerate(uuids):
        if uuid not in known:
            gpu = _note_gpu(agent, uuid, place, {}, at)
            known[uuid] = gpu.pk if gpu else None
    return [known[uuid] for uuid in uuids]


def note_counters(agent: Agent, uuid: str | None, told: dict[str, Any], at: datetime) -> None:
    """Store a GPU's slow counters as they are now, and what they say is broken."""
    fault = next(iter(health.faults(told)), "")
    Gpu.objects.filter(agent=agent, uuid=uuid or "").update(counters=cleaned(told), counted_at=at, fault=fault)


def _note_gpu(agent: Agent, uuid: str, place: int, about: dict[str, Any], at: datetime) -> Gpu | None:
    """Its row; None where it can't be this machine's.

    A GPU that moves has left the other machine, or that one is off: while it tells of it, nobody else is believed.
    """
    known = Gpu.objects.filter(uuid=uuid).select_related("agent").first()
    if known is None and agent.gpus.count() >= MOST_GPUS:
        return None
    if known is not None and known.agent_id != agent.pk and known.gone_at is None and not known.agent.is_silent():
        logger.warning("%s tells of %s, which %s has", agent, uuid, known.agent)
        return None
    index = untrusted.count(about.get("index"), 1024)
    told = {
        "agent": agent,
        "index": place if index is None else index,
        "minor": untrusted.count(about.get("minor"), 1024),
        "bus": untrusted.name(about.get("bus"), 32),
        "model": untrusted.name(about.get("name"), 128),
        "memory_mib": untrusted.count(about.get("memory_mib")),
        "power_cap_watts": _rounded(about.get("power_cap_watts")),
        "slowdown_c": _rounded(about.get("slowdown_c")),
        "facts": cleaned(about),
        "gone_at": None,
    }
    gpu, is_new = Gpu.objects.get_or_create(uuid=uuid, defaults=told | {"first_seen_at": at})
    if not is_new:
        if not about:  # nothing but that it is there
            told = {"agent": agent, "gone_at": None} | ({"index": place} if gpu.agent_id != agent.pk else {})
        for name, value in told.items():
            setattr(gpu, name, value)
        gpu.save(update_fields=list(told))
    _place(gpu, at)
    return gpu


def _place(gpu: Gpu, at: datetime) -> None:
    """The open interval of where it sits; who sat in that slot before sits there no more."""
    now = GpuPlace.objects.filter(gpu=gpu, until=None).first()
    if now is not None and (now.agent_id, now.index) == (gpu.agent_id, gpu.index):
        return
    for other in Gpu.objects.filter(agent=gpu.agent_id, index=gpu.index, gone_at=None).exclude(pk=gpu.pk):
        _leave(other, at)
    if now is not None:
        GpuPlace.objects.filter(pk=now.pk).update(until=max(at, now.since))
    GpuPlace.objects.create(gpu=gpu, agent_id=gpu.agent_id, index=gpu.index, since=at)


def _leave(gpu: Gpu, at: datetime) -> None:
    Gpu.objects.filter(pk=gpu.pk).update(gone_at=at)
    NodeEvent.objects.filter(gpu=gpu, is_open=True).update(
        is_open=False, last_at=at
    )  # nobody will tell that it is back
    for place in GpuPlace.objects.filter(gpu=gpu, until=None):
        GpuPlace.objects.filter(pk=place.pk).update(until=max(at, place.since))


def cleaned(value: Any, *, room: int = 6) -> Any:
    """What an agent told, as it may be kept and shown: bounded, and without what no database takes."""
    if isinstance(value, str):
        return untrusted.line(value, 500)
    if isinstance(value, dict) and room:
        return {untrusted.line(key, 64): cleaned(inner, room=room - 1) for key, inner in list(value.items())[:200]}
    if isinstance(value, list) and room:
        return [cleaned(inner, room=room - 1) for inner in value[:200]]
    return value if isinstance(value, bool | int | float) or value is None else None


def _rounded(value: object) -> int | None:
    number = untrusted.number(value, 1e6)
    return None if number is None else round(number)


def _dicts(value: object) -> list[dict[str, Any]]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
