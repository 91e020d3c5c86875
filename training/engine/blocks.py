"""What is done to a model's blocks on any layout: FP8 products, recomputation instead of memory, compilation.

What comes after them, the loss, is compiled with them.
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

from training.config.asked import ConfigError, Problem
from training.config.run_config import RunConfig
from training.data import Batch, Task

Context = AbstractContextManager[Any]
Contexts = Callable[[], tuple[Context, Context]]

SIXTEEN = 16
"""FP8 kernels want each side of a product to be a multiple of it."""


def to_fp8(model: nn.Module, config: RunConfig, device: torch.device, *, tokens: int = 1) -> None:
    """Makes the linear layers of the blocks multiply in FP8 (torchao); the head and the embedding stay as they are.

    Tensor-wise: E4M3 forward and E5M2 for gradients, one scale a tensor. Row-wise: a scale a row, E4M3 throughout.
    Where the device has no such products they are emulated: the numbers are the same, the speed is not. `tokens`: of a
    sample, on this rank; a weight's gradient is a sum over those of a micro-batch, filled up with zeros if need be.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        message = 'is "fp8", which needs the package torchao. Install it there, or write "bf16".'
        raise ConfigError([Problem("run.dtype", message)]) from None
    recipe = Float8LinearConfig.from_recipe_name(config.fp8_scaling)
    if not _multiplies_fp8(device):
        object.__setattr__(recipe, "emulate", True)  # it is frozen, and its recipes come ready-made
    if tokens % SIXTEEN:  # else not: even what needs no zeros would be copied for each product
        object.__setattr__(recipe, "pad_inner_dim", True)
    convert_to_float8_training(_blocks_of(model), config=recipe, module_filter_fn=_fits_fp8)


def prepare(part: nn.Module, config: RunConfig) -> None:
    """Recomputation and compilation of each block, or of the whole where a model has none; names stay as they are."""
    for block in _each(part):
        if config.recompute != "none":
            _recompute(block, config.recompute, compiled=config.compile)
        if config.compile:
            block.compile()


def fuse_loss(task: Task) -> Task:
    """The task with what follows its model compiled: logits are read as they are, never written in float32 first."""
    inputs, loss = task.inputs, task.loss
    assert inputs is not None
    # No shape is guessed to vary: a last, smaller micro-batch is worth code of its own.
    last = torch.compile(lambda outputs, batch: loss(lambda _: outputs, batch), dynamic=False)

    def fused(model: Callable[..., Tensor], batch: Batch) -> Tensor:
        found: Tensor = last(model(inputs(batch)), batch)
        return found

    return replace(task, loss=fused)


def _blocks_of(model: nn.Module) -> nn.Module:
    found = getattr(model, "blocks", None)
    return found if isinstance(found, nn.Module) else model


def _each(part: nn.Module) -> Iterable[nn.Module]:
    blocks = getattr(part, "blocks", None)
    return list(blocks.values()) if isinstance(blocks, nn.ModuleDict) else [part]


def _multiplies_fp8(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _fits_fp8(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and not module.in_features % SIXTEEN and not module.out_features % SIXTEEN


def _recompute(block: nn.Module, how: str, *, compiled: bool) -> None:
    """Puts checkpointing around a block's forward, not around the block: its parameters keep their names."""
    from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

    forward = block.forward
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy())
    if not compiled and next(block.buffers(), None) is not None:  # the compiler takes no context of ours
        options["context_fn"] = functools.partial(_updating_once, block, options.get("context_fn"))

    def recomputed(*arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments)
        return checkpoint(forward, *arguments, **options)

    block.forward = recomputed


def _updating_once(block: nn.Module, contexts: Contexts | None) -> tuple[Context, Context]:
    """Contexts of a block's forward and its recomputation, which would take a batch into running means once more."""
    first, again = contexts() if contexts is not None else (contextlib.nullcontext(), contextlib.nullcontext())
    return first, _with_buffers_kept(block, again)


@contextlib.contextmanager
def _with_buffers_kept(block: nn.Module, inner: Context) -> Iterator[None]:
    kept = [(buffer, buffer.clone()) for buffer in block.buffers()]
    try:
        with inner:
            yield
    finally:
        for buffer, before in kept:
            buffer.copy_(before)


def _policy() -> Callable[..., Any]:
    """Keep what is dear to compute, the products and attention; the rest is computed again (arXiv 2205.05198)."""
    from torch.utils.checkpoint import CheckpointPolicy

    dear = {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._scaled_mm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._efficient_attention_forward.default,  # what a causal bias on a GPU comes to in fp32
    }

    def keep(context: Any, operation: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in dear else CheckpointPolicy.PREFER_RECOMPUTE

    return keep
