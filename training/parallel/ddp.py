"""Every rank holds the whole model; gradients are averaged over the ranks (torch's DistributedDataParallel)."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("dp",)
"""The mesh's axes, outermost first; the batch is divided over `dp`."""


def apply(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    bucket_mib: Annotated[float, "0.1..4000", "Gradients are reduced in buckets of this size."] = 25.0,
) -> nn.Module:
    """The model as every rank calls it. One replica alone needs no wrapper."""
    from training.step.meshes import replicas

    group = replicas(mesh)
    if group.size() == 1:
        return model
    from training.parallel._replicated import replicate

    return replicate(model, group, bucket_mib=bucket_mib)


def accumulating(model: nn.Module) -> AbstractContextManager[None]:
    """Surrounds every micro-batch of a step but the last: gradients add up and are not yet reduced."""
    no_sync = getattr(model, "no_sync", None)
    return no_sync() if no_sync else contextlib.nullcontext()
