"""torch's DistributedDataParallel without the imports that a run without torch.compile does not need."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel


class Replicated(DistributedDataParallel):
    """DistributedDataParallel that doesn't import torch.compile's machinery where nothing is compiled."""

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        # The base class only tells dynamo which DDP module is active, importing it for that. Blocks are compiled one by
        # one: dynamo, if told, would cut each in pieces as large as a bucket, and takes no buckets below 1 MiB.
        return self.module(*inputs, **kwargs)


def replicate(model: nn.Module, group: ProcessGroup, *, bucket_mib: float) -> Replicated:
    device = next(model.parameters()).device
    with _without_dynamo():
        return Replicated(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            process_group=group,
            bucket_cap_mb=bucket_mib,
            forward_sync_buffers=False,  # they are after each pass (engine.composing)
            gradient_as_bucket_view=True,
        )


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
