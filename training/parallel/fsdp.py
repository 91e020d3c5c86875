"""Each rank has a part of every parameter and gathers a block's just in time (torch's FSDP2); with dp > 1, HSDP.

Zhao et al., 2023, arXiv 2304.11277; sharded within `shard`, replicated along `dp`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("dp", "shard")
WITHOUT_WEIGHTS = True
"""It may be applied before the weights are allocated: no rank ever has the whole model."""


def reshards(reshard: object, *, has_pipeline: bool) -> bool:
    """Return whether a block's parameters are freed after the forward pass.

    They are gathered again for the backward pass.
    """
    return not has_pipeline if reshard == "auto" else reshard == "always"


def apply(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    reshard: Annotated[
        Literal["auto", "always", "never"],
        "Whether a block's parameters are freed after the forward pass; never: faster, more memory; "
        "auto: always, except in a pipeline.",
    ] = "auto",
    offload: Annotated[bool, "Parameters, gradients and the optimizer's state stay in main memory."] = False,
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        "Type in which parameters are gathered and multiplied; default: run.dtype.",
    ] = None,
) -> nn.Module:
    import torch
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    kind = kinds.get(dtype or "")
    reduced = torch.float32 if kind else None
    policy: dict[str, Any] = {
        "mesh": _shards(mesh),
        "reshard_after_forward": reshards(reshard, has_pipeline="pp" in (mesh.mesh_dim_names or ())),
        # Pinning needs an accelerator.
        "offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy(),
    }
    blocks = getattr(model, "blocks", None)
    for block in blocks.values() if blocks is not None else ():
        # Cosine and sine of the positions are float32 and must stay so.
        fully_shard(block, mp_policy=MixedPrecisionPolicy(kind, reduced, cast_forward_inputs=False), **policy)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(kind, reduced, output_dtype=reduced), **policy)
    return model


def no_sync(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Return a context for every micro-batch of a step but the last: gradients accumulate without being reduced."""
    return _unreduced(model)


@contextlib.contextmanager
def _unreduced(model: Any) -> Iterator[None]:
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


def _shards(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh for sharding: replicas outermost.

    Ranks along the context have other tokens, so they share the shards.
    """
    from torch.distributed.device_mesh import DeviceMesh

    names = mesh.mesh_dim_names or ()
    if "cp" not in names:
        return mesh["dp", "shard"] if "dp" in names else mesh["shard"]
    flat = mesh["shard", "cp"]._flatten("shard_cp")
    return DeviceMesh._concatenate([mesh["dp"], flat]) if "dp" in names else flat
