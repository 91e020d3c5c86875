"""Estimate or read the inlet temperature of nodes and racks, once a minute, and store it by rack and hour."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, NamedTuple

from django.db import transaction
from django.utils import timezone

from nodes.cluster.racks import natural_sort_key
from nodes.health.inlet import GpuThermals, NodeInlet, RackInlet, ThermalReading, node_inlet, rack_inlets, resistances
from nodes.health.progress import Subject
from nodes.models import Agent, Gpu, NodeThermals, RackPlace, RackTemperature
from nodes.monitoring import assessments
from portal import bulk
from vigil_core import untrusted

COLDEST_C, WARMEST_C = -10.0, 80.0
"""What a BMC reports or GPUs suggest outside of this is no inlet temperature."""
MAX_ROWS = 200
"""Per transaction."""
UNKNOWN = {"inlet_c": None, "above_neighbours_c": None, "nodes": 0}


def measure(now: datetime | None = None) -> list[RackInlet]:
    """Learn from the newest readings of all GPUs, and store the inlets of nodes and racks. Returns those of racks."""
    now = now or timezone.now()
    silent: list[Agent] = []
    agents: list[Agent] = []
    for agent in Agent.objects.filter(is_made_up=False).only("node", "heard_at", "sampled_at", "newest"):
        (silent if agent.is_silent(now) else agents).append(agent)
    models: defaultdict[int, dict[str, str]] = defaultdict(dict)
    for agent_id, uuid, model in Gpu.objects.filter(gone_at=None, lost_at=None).values_list("agent", "uuid", "model"):
        models[agent_id][uuid] = model
    rows = {row.agent_id: row for row in NodeThermals.objects.all()}
    thermals = {agent.pk: _learn(agent, models[agent.pk], rows.get(agent.pk)) for agent in agents}
    resistance = resistances(
        (models[pk].get(uuid, ""), gpu) for pk, gpus in thermals.items() for uuid, gpu in gpus.items()
    )
    inlets = {agent.node: NodeInlet(agent.node, model=_usual(models[agent.pk])) for agent in silent}
    inlets |= {agent.node: _inlet(agent, models[agent.pk], thermals[agent.pk], resistance) for agent in agents}
    _store_nodes(agents, rows, thermals, now)
    racks = racks_in_order()
    found = rack_inlets([(rack, [inlets[node] for node in nodes if node in inlets]) for rack, nodes in racks])
    _store_racks(found, dict(racks), now)
    return found


def racks_in_order() -> list[tuple[str, list[str]]]:
    """Return the racks as they stand next to each other, with their nodes."""
    places: dict[str, list[RackPlace]] = {}
    for row in RackPlace.objects.all():
        places.setdefault(row.rack, []).append(row)
    names = sorted(places, key=natural_sort_key)
    names.sort(key=lambda rack: places[rack][0].order)
    return [(rack, [row.node for row in places[rack]]) for rack in names]


def _learn(agent: Agent, models: Mapping[str, str], row: NodeThermals | None) -> dict[str, GpuThermals]:
    """Return what is known of the node's GPUs after its newest reading."""
    stored = row.gpus if row is not None and isinstance(row.gpus, dict) else {}
    newest = agent.newest.get("gpus") if isinstance(agent.newest, dict) else None
    found = {}
    for uuid in models:
        gpu = found[uuid] = GpuThermals.from_payload(stored.get(uuid))
        values = newest.get(uuid) if isinstance(newest, dict) else None
        reading = _reading(agent, values) if isinstance(values, dict) else None
        if reading is not None and (gpu.last is None or reading.at > gpu.last.at):
            gpu.observe(reading)
    return found


def _reading(agent: Agent, values: Mapping[str, Any]) -> ThermalReading | None:
    celsius, watts = (untrusted.number(values.get(name), 1e4) for name in ("temperature_c", "watts"))
    if celsius is None or watts is None or agent.sampled_at is None:
        return None
    return ThermalReading(float(agent.sampled_at), celsius, watts)


def _inlet(
    agent: Agent, models: Mapping[str, str], gpus: Mapping[str, GpuThermals], resistance: Mapping[str, float]
) -> NodeInlet:
    estimated = untrusted.within(
        node_inlet([(models[uuid], gpu) for uuid, gpu in gpus.items()], resistance), COLDEST_C, WARMEST_C
    )
    host = agent.newest.get("host") if isinstance(agent.newest, dict) else None
    measured = untrusted.within(host.get("inlet_c"), COLDEST_C, WARMEST_C) if isinstance(host, dict) else None
    return NodeInlet(agent.node, measured, estimated, _usual(models))


def _usual(models: Mapping[str, str]) -> str:
    """Return the model of most of a node's GPUs; "" without any."""
    return Counter(models.values()).most_common(1)[0][0] if models else ""


def _store_nodes(
    agents: Sequence[Agent],
    rows: Mapping[int, NodeThermals],
    thermals: Mapping[int, Mapping[str, GpuThermals]],
    now: datetime,
) -> None:
    new: list[NodeThermals] = []
    changed: list[NodeThermals] = []
    for agent in agents:
        row = rows.get(agent.pk) or NodeThermals(agent=agent)
        row.gpus = {uuid: gpu.as_payload() for uuid, gpu in thermals[agent.pk].items()}
        row.updated_at = now
        (changed if row.pk else new).append(row)
    NodeThermals.objects.bulk_create(new, ignore_conflicts=True)
    for some in _batches(changed):
        bulk.update_rows(some, ("gpus", "updated_at"))


def _store_racks(found: Sequence[RackInlet], nodes: Mapping[str, Sequence[str]], now: datetime) -> None:
    hour = now.replace(minute=0, second=0, microsecond=0)
    with transaction.atomic():
        rows = {row.rack: row for row in RackTemperature.objects.filter(hour=hour)}
        new = []
        for inlet in found:
            row = rows.get(inlet.rack)
            if row is None:
                row = RackTemperature(rack=inlet.rack, hour=hour, is_estimate=False)
                new.append(row)
            row.sum_c, row.count = row.sum_c + inlet.inlet_c, row.count + 1
            row.is_estimate = row.is_estimate or inlet.is_estimate
            row.nodes = len(nodes[inlet.rack])
        RackTemperature.objects.bulk_create(new, ignore_conflicts=True)
        bulk.update_rows(list(rows.values()), ("sum_c", "count", "is_estimate", "nodes"))
    fields = {
        Subject("", "", inlet.rack): {
            "inlet_c": inlet.inlet_c,
            "above_neighbours_c": inlet.above_neighbours_c,
            "is_estimate": inlet.is_estimate,
            "nodes": inlet.nodes,
        }
        for inlet in found
    }
    assessments.replace("rack_inlet", fields, UNKNOWN, now)


class RackHour(NamedTuple):
    """The mean inlet temperature of a rack in one hour; `is_estimate`: it was not measured all the time."""

    hour: datetime
    celsius: float
    is_estimate: bool


def hourly(span: timedelta, now: datetime) -> dict[str, list[RackHour]]:
    """Return the hours of the last time span by rack, oldest first."""
    found: defaultdict[str, list[RackHour]] = defaultdict(list)
    rows = RackTemperature.objects.filter(hour__gt=now - span, count__gt=0).order_by("hour")
    for rack, hour, total, count, is_estimate in rows.values_list("rack", "hour", "sum_c", "count", "is_estimate"):
        found[rack].append(RackHour(hour, total / count, is_estimate))
    return dict(found)


def _batches(rows: Sequence[NodeThermals]) -> Iterable[Sequence[NodeThermals]]:
    for start in range(0, len(rows), MAX_ROWS):
        yield rows[start : start + MAX_ROWS]
