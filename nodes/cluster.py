"""The cluster's rows as the dataclasses that the scheduler answered: one query each, and no scheduler is asked."""

from __future__ import annotations

from dataclasses import fields
from datetime import datetime
from typing import Any, TypeVar

from django.utils import timezone

from nodes import models
from nodes.capacity import Cluster
from nodes.schedulers import cluster as told
from nodes.schedulers.base import NodeStatus

Told = TypeVar("Told")
_INDICES = "gpu_indices"


def read(now: datetime | None = None) -> Cluster:
    """Everything that the scheduler last told."""
    return Cluster(
        now=(now or timezone.now()).timestamp(),
        nodes=_read(models.Node, NodeStatus),
        partitions=_read(models.Partition, told.Partition),
        qos=_read(models.Qos, told.Qos),
        associations=_read(models.Association, told.Association),
        reservations=_read(models.Reservation, told.Reservation),
        queue=_read(models.QueuedJob, told.QueuedJob),
    )


def _read(model: type[models.Fact], kind: type[Told]) -> tuple[Told, ...]:
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
    """How a column's value becomes the field's: times, tuples, limits; "" where it is the same."""
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
    "limits": lambda value: told.Limits(**value),
}
