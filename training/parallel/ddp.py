"""Every rank holds the whole model; gradients are averaged over the ranks (torch's DistributedDataParallel)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("dp",)
"""The mesh's axes, outermost first; the batch is divided over `dp`."""


def check(shape: Mapping[str, int], **options: object) -> None:
    """Raises ValueError with the nearest shape that works; any number of ranks does here."""


def apply(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    bucket_mib: Annotated[float, "0.1..4000", "Gradients are reduced in buckets of this size."] = 25.0,
) -> nn.Module:
    """The model as every rank calls it. One rank alone needs no wrapper."""
    if mesh.size() == 1:
        return model
    device = next(model.parameters()).device
    with _without_dynamo():
        return Replicated(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            process_group=mesh.get_group("dp"),
            bucket_cap_mb=bucket_mib,
            gradient_as_bucket_view=True,
        )


def accumulating(model: nn.Module) -> AbstractContextManager[None]:
    """Around every micro-batch of a step but the last: gradients add up and are not yet reduced."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else contextlib.nullcontext()


class Replicated(DistributedDataParallel):
    """DistributedDataParallel that doesn't import torch.compile's machinery where nothing is compiled."""

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        # The base class only tells dynamo which DDP module is active, importing it for that.
        if "torch._dynamo" in sys.modules:
            return super()._run_ddp_forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        return self.module(*inputs, **kwargs)


@contextlib.contextmanager
def _without_dynamo() -> Iterator[None]:
    """The constructor asks dynamo for one setting, whose import takes as long as torch's own: answer in its place.

    `torch._dynamo` is a lazy attribute; it is put back to lazy before anybody else can look.
    """
    if "torch._dynamo" in sys.modules:
        yield
        return
    answer = SimpleNamespace(utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"))
    torch.__dict__["_dynamo"] = answer
    try:
        yield
    finally:
        if torch.__dict__.get("_dynamo") is answer:
            del torch.__dict__["_dynamo"]
