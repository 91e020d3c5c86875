"""torch's DistributedDataParallel without imports that a run without torch.compile does not need."""

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
    """DistributedDataParallel that does not import torch.compile's machinery where nothing is compiled."""

    def _run_ddp_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        # The base class only informs dynamo which DDP module is active, and imports it for that. Blocks are compiled
        # one by one: with this information dynamo would split each into pieces of a bucket's size, and refuses buckets
        # below 1 MiB.
        return self.module(*inputs, **kwargs)


def replicate(model: nn.Module, group: ProcessGroup, *, bucket_mib: float) -> Replicated:
    device = next(model.parameters()).device
    with _without_dynamo():
        return Replicated(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            process_group=group,
            bucket_cap_mb=bucket_mib,
            forward_sync_buffers=False,  # done after each pass (engine.composing)
            gradient_as_bucket_view=True,
        )


@contextlib.contextmanager
def _without_dynamo() -> Iterator[None]:
    """Answer the constructor's query for one setting of dynamo, whose import takes as long as torch's own.

    `torch._dynamo` is a lazy attribute; it is restored before any other code can access it.
    """
    if "torch._dynamo" in sys.modules:
        yield
        return
    stub = SimpleNamespace(utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"))
    torch.__dict__["_dynamo"] = stub
    try:
        yield
    finally:
        if torch.__dict__.get("_dynamo") is stub:
            del torch.__dict__["_dynamo"]
