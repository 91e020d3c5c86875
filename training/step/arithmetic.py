"""One step's arithmetic: micro-batches forward and backward, the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from training.config.run_config import RunConfig
from training.data import Batch, Task

Accumulating = Callable[[nn.Module], AbstractContextManager[None]]


@dataclass(frozen=True)
class MicroBatch:
    """What goes through the model at once on this rank."""

    batch: Batch
    weight: float | Tensor
    """The weight of its mean loss, such that the mean over all ranks of the weighted sums is the mean over the global
    batch; with the loss scale, if there is one."""
    share: float
    """Its part of this rank's samples."""
    seed: int
    """The seed of the model's random numbers: made of nothing but (seed, step, micro-batch, dp index), and where this
    rank is along axes that divide a sample's tokens."""


def forward_backward(
    task: Task, model: nn.Module, micro_batches: Sequence[MicroBatch], accumulating: Accumulating
) -> Tensor:
    """Leaves the gradient of the global batch's mean loss in the parameters; this rank's own mean loss, a scalar.

    A parallelism that runs the model otherwise (a pipeline) brings its own function of this name.
    """
    total: Tensor | None = None
    for index, micro in enumerate(micro_batches):
        last = index == len(micro_batches) - 1
        seed_model(micro.seed, micro.batch[0].device)
        with nullcontext() if last else accumulating(model):
            loss = task.loss(model, micro.batch)
            # Times one is a kernel each way that changes nothing; a tensor's value is not looked at.
            weighs = isinstance(micro.weight, Tensor) or micro.weight != 1
            (loss * micro.weight if weighs else loss).backward()  # type: ignore[no-untyped-call]
        part = loss.detach() * micro.share
        total = part if total is None else total + part
    assert total is not None
    return total


def seed_model(seed: int, device: torch.device) -> None:
    """Seeds the generator that dropout on this device draws from, and no other: it costs a microsecond."""
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def learning_rate(config: RunConfig, finished: int) -> float:
    """The rate of the step after so many finished ones: a linear warm-up, then half a cosine down to the lowest."""
    if finished < config.warmup_steps:
        return config.learning_rate * (finished + 1) / config.warmup_steps
    through = (finished - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, through)))
    return config.learning_rate * (config.min_learning_rate_ratio + (1 - config.min_learning_rate_ratio) * cosine)
