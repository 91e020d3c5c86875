"""Every rank has the whole model; gradients are averaged over the ranks (torch's DistributedDataParallel)."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("dp",)
"""Axes of the mesh, outermost first; the batch is divided over `dp`."""


def apply(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    bucket_mib: Annotated[float, "0.1..4000", "Gradients are reduced in buckets of this size."] = 25.0,
) -> nn.Module:
    """Return the model as every rank calls it. A single replica needs no wrapper."""
    from training.step.meshes import replicas

    group = replicas(mesh)
    if group.size() == 1:
        return model
    from training.parallel._replicated import replicate

    return replicate(model, group, bucket_mib=bucket_mib)


def no_sync(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context for every micro-batch of a step but the last: gradients accumulate without being reduced."""
    context = getattr(model, "no_sync", None)
    return context() if context else contextlib.nullcontext()
