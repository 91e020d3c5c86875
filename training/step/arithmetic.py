"""The arithmetic of one step: micro-batches forward and backward, the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from training.config.run_config import RunConfig
from training.data import Batch, Task

NoSync = Callable[[nn.Module], AbstractContextManager[None]]


@dataclass(frozen=True)
class MicroBatch:
    """The samples of one forward pass on this rank."""

    batch: Batch
    weight: float | Tensor
    """Weight of its mean loss, such that the mean over all ranks of weighted sums is the mean over the global batch;
    includes the loss scale, if there is one.
    """
    share: float
    """Its fraction of this rank's samples."""
    seed: int
    """Seed of the model's random numbers, derived from (seed, step, micro-batch, dp index) and from this rank's
    coordinates along axes that divide a sample's tokens."""


def forward_backward(task: Task, model: nn.Module, micro_batches: Sequence[MicroBatch], no_sync: NoSync) -> Tensor:
    """Leave the gradient of the global batch's mean loss in the parameters; return this rank's own mean loss, a scalar.

    A parallelism that runs the model differently (a pipeline) provides its own function of this name.
    """
    total: Tensor | None = None
    for index, micro in enumerate(micro_batches):
        last = index == len(micro_batches) - 1
        seed_model(micro.seed, micro.batch[0].device)
        with nullcontext() if last else no_sync(model):
            loss = task.loss(model, micro.batch)
            # Avoid multiplying by one, a kernel each way. A tensor's value is not inspected, which would synchronise.
            weighs = isinstance(micro.weight, Tensor) or micro.weight != 1
            (loss * micro.weight if weighs else loss).backward()  # type: ignore[no-untyped-call]
        part = loss.detach() * micro.share
        total = part if total is None else total + part
    assert total is not None
    return total


def seed_model(seed: int, device: torch.device) -> None:
    """Seed the generator that dropout on this device uses, and no other: this takes a microsecond."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def learning_rate(config: RunConfig, finished: int) -> float:
    """Return the rate of the step after `finished` steps: a linear warm-up, then half a cosine down to the minimum."""
    if finished < config.warmup_steps:
        return config.learning_rate * (finished + 1) / config.warmup_steps
    progress = (finished - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.learning_rate * (config.min_learning_rate_ratio + (1 - config.min_learning_rate_ratio) * cosine)
