"""The device mesh of a run, and the groups of ranks along its axes that the parallelisms need."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from training.config.shape import DATA_AXES, Shape


def make(shape: Shape, device: torch.device) -> DeviceMesh:
    return init_device_mesh(device.type, tuple(shape.sizes.values()), mesh_dim_names=tuple(shape.sizes))


def along(mesh: DeviceMesh, *axes: str) -> DeviceMesh | None:
    """Return the mesh along those of these axes that exist, flattened to one; None if none exists."""
    names = mesh.mesh_dim_names or ()
    existing = tuple(axis for axis in axes if axis in names)
    if len(existing) <= 1:
        return mesh[existing[0]] if existing else None
    return mesh[existing]._flatten("_".join(existing))


def replicas(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of ranks whose gradients are averaged, where all have the same parameters."""
    submesh = along(mesh, "dp", "cp")
    assert submesh is not None, "a mesh has an axis along which the batch is divided"
    return submesh.get_group()


def coordinate(mesh: DeviceMesh) -> tuple[int, int]:
    """Return (index, count) of this rank among the coordinates over which the batch is divided."""
    index = 0
    count = 1
    for axis in DATA_AXES:
        if axis in (mesh.mesh_dim_names or ()):
            size = mesh[axis].size()
            index, count = index * size + mesh[axis].get_local_rank(), count * size
    return index, count
