"""The ranks of `tp` share each matrix: columns of one, rows of the next (Megatron-LM, arXiv 1909.08053)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from math import gcd
from typing import TYPE_CHECKING, Annotated, Any

from training.config.shape import VOCABULARY, Misfit, Shape, nearest_divisors

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ParallelStyle

AXES = ("tp",)


def check(shape: Shape, *, sequence_parallel: bool = True, **options: object) -> None:
    """Check that the model's sizes divide over tp. Raises Misfit.

    These are heads, the network's width, the vocabulary and, for sequence parallelism, the context.
    """
    tp, dims = shape["tp"], shape.dims
    if dims is None:
        raise Misfit("mesh.tp", "this recipe's model does not say how its matrices are split. Leave the axis out.")
    sizes = {"heads": dims.heads, "kv_heads": dims.kv_heads, "hidden": dims.hidden}
    if dims.vocabulary_is_known:
        sizes["vocabulary"] = dims.vocabulary
    if sequence_parallel:
        sizes["context"] = dims.context // shape["cp"]
    uneven = {name: size for name, size in sizes.items() if size % tp}
    if list(uneven) == [VOCABULARY]:
        raise Misfit(VOCABULARY, f"is {dims.vocabulary}, which does not divide by {tp}.")
    for name, size in sizes.items():
        if size % tp:
            fits = nearest_divisors(tp, gcd(shape.ranks_for("tp"), *sizes.values()))
            raise Misfit("mesh.tp", f"the model's {name}, {size}, does not divide by {tp}. {fits}")


def apply(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    sequence_parallel: Annotated[
        bool, "Between the matrices, ranks have parts of the sequence instead of copies."
    ] = True,
    loss_parallel: Annotated[bool, "Compute the loss from parts of the vocabulary; logits are never gathered."] = True,
) -> nn.Module:
    from torch.distributed.tensor.parallel import parallelize_module

    styles = _styles(sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    roles: dict[str, str] = model.TENSOR  # type: ignore[assignment]
    plan = {name: styles[role] for name, role in roles.items() if role in styles and _has(model, name)}
    return parallelize_module(model, mesh["tp"], plan)


def step_context(*, loss_parallel: bool = True, **options: object) -> AbstractContextManager[Any]:
    """Return a context for forward pass, loss and backward pass."""
    if not loss_parallel:
        return nullcontext()
    from torch.distributed.tensor import parallel

    return parallel.loss_parallel()


def splits_tokens(*, sequence_parallel: bool = True, **options: object) -> bool:
    """Return whether ranks have different parts of the sequence between the matrices, where dropout is."""
    return sequence_parallel


def _styles(*, sequence_parallel: bool, loss_parallel: bool) -> dict[str, ParallelStyle]:
    """Return what the words in a model's TENSOR mean; activations are (samples, T, width)."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
    )

    between = Shard(1) if sequence_parallel else Replicate()
    logits = Shard(-1) if loss_parallel else Replicate()
    styles: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "columns": ColwiseParallel(),
        "rows": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=logits, use_local_output=not loss_parallel),
    }
    if sequence_parallel:
        styles["norm"] = SequenceParallel()
        styles["network"] = PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),))
        styles["attention"] = PrepareModuleInput(
            input_layouts=(between, None, None), desired_input_layouts=(Replicate(), None, None)
        )
    return styles


def _has(model: nn.Module, pattern: str) -> bool:
    """Return whether the part exists: a pipeline stage lacks some."""
    name, _, rest = pattern.partition(".*")
    part = getattr(model, name, None)
    return part is not None and (not rest or len(part) > 0)
