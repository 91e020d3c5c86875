"""Every rank has the whole model, but only its part of the optimizer's state (ZeRO-1, arXiv 1910.02054).

Gradients are averaged as with ddp; torch's ZeroRedundancyOptimizer divides the state.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

from training.parallel import ddp

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from training.step.optimizer import Optimizer

AXES = ("dp",)


def apply(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    bucket_mib: Annotated[float, "0.1..4000", "Gradients are reduced in buckets of this size."] = 25.0,
) -> nn.Module:
    return ddp.apply(model, mesh, bucket_mib=bucket_mib)


no_sync = ddp.no_sync


def optimizer(parameters: Iterable[tuple[str, nn.Parameter]], mesh: DeviceMesh, *, weight_decay: float) -> Optimizer:
    """Return the optimizer, which updates this rank's part of the parameters and sends them to the others."""
    from training.parallel._partitioned_adamw import PartitionedAdamW

    return PartitionedAdamW(parameters, mesh["dp"].get_group(), weight_decay=weight_decay)
