"""Transform a model's blocks on any layout: FP8 products, recomputation to save memory, compilation.

The loss, which comes after them, is compiled too.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from training.config.base import ConfigError, Problem
from training.config.run_config import RunConfig
from training.data import Batch, Task

Context = AbstractContextManager[Any]
Contexts = Callable[[], tuple[Context, Context]]

FP8_MULTIPLE = 16
"""FP8 kernels require each dimension of a product to be a multiple of this."""


def to_fp8(model: nn.Module, config: RunConfig, device: torch.device, *, tokens: int = 1) -> None:
    """Make the linear layers of the blocks multiply in FP8 (torchao); the head and the embedding stay as they are.

    Tensor-wise: E4M3 forward and E5M2 for gradients, one scale per tensor. Row-wise: one scale per row, E4M3
    throughout. Devices without such products emulate them, with the same numbers but slowly. `tokens`: per sample on
    this rank; a weight's gradient is a sum over those of a micro-batch, padded with zeros if necessary. Raises
    ConfigError.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        message = 'is "fp8", which needs the package torchao. Install it there, or write "bf16".'
        raise ConfigError([Problem("run.dtype", message)]) from None
    recipe = Float8LinearConfig.from_recipe_name(config.fp8_scaling)
    if not _multiplies_fp8(device):
        object.__setattr__(recipe, "emulate", True)  # the configuration is frozen
    if tokens % FP8_MULTIPLE:  # not otherwise: padding copies even what needs no zeros
        object.__setattr__(recipe, "pad_inner_dim", True)
    convert_to_float8_training(_blocks_of(model), config=recipe, module_filter_fn=_fits_fp8)


def prepare(part: nn.Module, config: RunConfig) -> None:
    """Set up recomputation and compilation of each block, or of a whole model without blocks; names do not change."""
    for block in _blocks(part):
        if config.recompute != "none":
            _recompute(block, config.recompute, compiled=config.compile)
        if config.compile:
            block.compile()


def fuse_loss(task: Task) -> Task:
    """Return the task with its loss compiled: logits are read as they are, never written in float32 first."""
    inputs, loss = task.inputs, task.loss
    assert inputs is not None
    # No dynamic shapes: a smaller last micro-batch is worth a compilation of its own.
    last = torch.compile(lambda outputs, batch: loss(lambda _: outputs, batch), dynamic=False)

    def fused(model: Callable[..., Tensor], batch: Batch) -> Tensor:
        result: Tensor = last(model(inputs(batch)), batch)
        return result

    return replace(task, loss=fused)


def _blocks_of(model: nn.Module) -> nn.Module:
    blocks = getattr(model, "blocks", None)
    return blocks if isinstance(blocks, nn.Module) else model


def _blocks(part: nn.Module) -> Iterable[nn.Module]:
    blocks = getattr(part, "blocks", None)
    return list(blocks.values()) if isinstance(blocks, nn.ModuleDict) else [part]


def _multiplies_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _fits_fp8(module: nn.Module, name: str) -> bool:
    return (
        isinstance(module, nn.Linear)
        and not module.in_features % FP8_MULTIPLE
        and not module.out_features % FP8_MULTIPLE
    )


def _recompute(block: nn.Module, how: str, *, compiled: bool) -> None:
    """Checkpoint a block's forward function instead of wrapping the block: its parameters keep their names."""
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    forward = block.forward
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy())
    if not compiled and next(block.buffers(), None) is not None:  # the compiler does not support our context
        options["context_fn"] = functools.partial(_contexts_updating_once, block, options.get("context_fn"))

    def recomputed(*arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments)
        return checkpoint(forward, *arguments, **options)

    block.forward = recomputed


def _contexts_updating_once(block: nn.Module, contexts: Contexts | None) -> tuple[Context, Context]:
    """Return contexts for a block's forward pass and for its recomputation.

    The recomputation must not update running means a second time.
    """
    first, again = contexts() if contexts is not None else (contextlib.nullcontext(), contextlib.nullcontext())
    return first, _preserving_buffers(block, again)


@contextlib.contextmanager
def _preserving_buffers(block: nn.Module, inner: Context) -> Iterator[None]:
    saved = [(buffer, buffer.clone()) for buffer in block.buffers()]
    try:
        with inner:
            yield
    finally:
        for buffer, before in saved:
            buffer.copy_(before)


def _policy() -> Callable[..., Any]:
    """Store what is expensive to compute, products and attention; recompute the rest (arXiv 2205.05198)."""
    from torch.utils.checkpoint import CheckpointPolicy

    expensive = {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._scaled_mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._efficient_attention_forward.default,  # used for a causal bias on a GPU in fp32
    }

    def keep(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in expensive else CheckpointPolicy.PREFER_RECOMPUTE

    return keep
