"""The device mesh of a run, and the groups of ranks along its axes that the parallelisms ask for."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from training.config.shape import DATA_AXES, Shape


def make(shape: Shape, device: torch.device) -> DeviceMesh:
    return init_device_mesh(device.type, tuple(shape.sizes.values()), mesh_dim_names=tuple(shape.sizes))


def along(mesh: DeviceMesh, *axes: str) -> DeviceMesh | None:
    """The mesh along those of these axes that it has, flattened to one; None if it has none of them."""
    names = mesh.mesh_dim_names or ()
    found = tuple(axis for axis in axes if axis in names)
    if len(found) <= 1:
        return mesh[found[0]] if found else None
    return mesh[found]._flatten("_".join(found))


def replicas(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The ranks whose gradients are averaged where each holds all that its peers hold."""
    found = along(mesh, "dp", "cp")
    assert found is not None, "a mesh has an axis along which the batch is divided"
    return found.get_group()


def coordinate(mesh: DeviceMesh) -> tuple[int, int]:
    """(index, count) of this rank among those that the batch is divided over."""
    index = 0
    count = 1
    for axis in DATA_AXES:
        if axis in (mesh.mesh_dim_names or ()):
            size = mesh[axis].size()
            index, count = index * size + mesh[axis].get_local_rank(), count * size
    return index, count
