"""Read the cluster's rows as the scheduler's dataclasses: one query each, without contacting the scheduler."""

from __future__ import annotations

from dataclasses import fields
from datetime import datetime
from typing import Any, TypeVar

from django.utils import timezone

from nodes import models
from nodes.schedulers import cluster
from nodes.schedulers.base import NodeStatus
from nodes.scheduling import gpu_types as types
from nodes.scheduling.capacity import ClusterCapacity
from nodes.scheduling.maintenance import PlannedMaintenance

Reported = TypeVar("Reported")
_INDICES = "gpu_indices"


def read(now: datetime | None = None) -> ClusterCapacity:
    """Return everything that the scheduler last reported; rows come from a cache until they are read again."""
    read_at = dict(models.Reading.objects.values_list("part", "read_at"))
    part = models.Reading.Part
    return ClusterCapacity(
        now=(now or timezone.now()).timestamp(),
        nodes=_cached(models.Node, NodeStatus, read_at.get(part.NODES)),
        partitions=_cached(models.Partition, cluster.PartitionInfo, read_at.get(part.PARTITIONS)),
        qos=_cached(models.Qos, cluster.QosInfo, read_at.get(part.ACCOUNTS)),
        associations=_cached(models.Association, cluster.AssociationInfo, read_at.get(part.ACCOUNTS)),
        reservations=_cached(models.Reservation, cluster.ReservationInfo, read_at.get(part.RESERVATIONS)),
        licenses=_cached(models.License, cluster.LicenseInfo, read_at.get(part.LICENSES)),
        queue=_cached(models.QueuedJob, cluster.QueuedJobInfo, read_at.get(part.QUEUE)),
    )


def maintenance() -> list[PlannedMaintenance]:
    """Return the maintenance windows that are planned or have begun, the next one first."""
    return [
        PlannedMaintenance(
            reason=window.reason,
            nodes=frozenset(window.nodes),
            starts_at=window.starts_at.timestamp(),
            ends_at=window.ends_at.timestamp(),
            is_reserved=window.wants_reservation or bool(window.reservation),
            reservation=window.reservation,
            requester=window.requester,
        )
        for window in models.MaintenanceWindow.objects.unfinished().order_by("starts_at")
    ]


def gpu_types() -> list[str]:
    """Return every type of GPU that the scheduler's nodes have, as it spells them."""
    rows = models.Node.objects.reported().only("gpus", "gpu_type", "gpus_by_type")
    return types.names(rows)


_last: dict[type[models.Fact], tuple[datetime, tuple[Any, ...]]] = {}


def _cached(model: type[models.Fact], kind: type[Reported], read_at: datetime | None) -> tuple[Reported, ...]:
    """Return the rows, cached per reading: they change only with their reading, in its transaction."""
    cached = _last.get(model)
    if cached is not None and cached[0] == read_at:
        return cached[1]
    rows = _read(model, kind)
    if read_at is not None:
        _last[model] = (read_at, rows)
    return rows


def _read(model: type[models.Fact], kind: type[Reported]) -> tuple[Reported, ...]:
    names = _names(kind)
    rows = model._default_manager.filter(is_made_up=False).order_by("pk").values_list(*names)
    shapes = [(i, _SHAPES[shape]) for i, name in enumerate(names) if (shape := _shape(name, kind))]
    found = []
    for row in rows.iterator():
        values = list(row)
        for i, shaped in shapes:
            values[i] = shaped(values[i])
        found.append(kind(**dict(zip(names, values, strict=True))))
    return tuple(found)


def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


def _shape(name: str, kind: type[Any]) -> str:
    """Return how a column's value becomes the field's: times, tuples, limits; "" if it is the same."""
    of = {field.name: str(field.type) for field in fields(kind)}[name]
    if name.endswith("_at"):
        return "time"
    if name == _INDICES:
        return "indices"
    if of == "Limits":
        return "limits"
    return "tuple" if of.startswith("tuple") else ""


_SHAPES: dict[str, Any] = {
    "time": lambda value: value and value.timestamp(),
    "tuple": tuple,
    "indices": lambda value: {node: tuple(indices) for node, indices in value.items()},
    "limits": lambda value: cluster.Limits(**value),
}
