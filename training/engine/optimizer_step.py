"""Perform one optimizer step: forward, backward, the gradient's norm, and the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from training.config.run_config import RunConfig
from training.engine.assembling import Assembly
from training.loader.feeding import LoadedBatch
from training.loader.order import Loader
from training.runtime.seeds import derive_seed
from training.step import arithmetic
from training.step.arithmetic import MicroBatch
from training.step.clipping import GradientGuard, GuardDecision
from training.step.loss_scale import LossScale
from training.step.norms import GradientNorm
from training.step.own_time import OwnTime

DISCARDED = 2**32
"""Used instead of a step's number in the seed of the discarded pass."""


@dataclass(frozen=True)
class StepResult:
    """The results of a step; the tensors are scalars on the device."""

    loss: Tensor
    """Mean loss of this rank's samples."""
    norm: Tensor
    """Norm of the whole gradient before clipping."""
    learning_rate: float
    guard_decision: GuardDecision


class StepRecord(NamedTuple):
    """A step that the device has finished, as known on the host; with a GPU some steps after it was queued."""

    step: int
    loss: float
    """Mean loss of this rank's samples."""
    norm: float
    seconds: float
    """Seconds from the step's beginning to its end; on the device, where the host runs ahead of it."""
    saving: bool
    """Whether some rank was writing a checkpoint meanwhile."""
    exchange: float = 0.0
    """Seconds of an exchange of infrequently synchronised replicas after the step; set on rank 0."""


class OptimizerStep:
    """Performs the steps of one run, on one rank."""

    def __init__(
        self,
        config: RunConfig,
        assembly: Assembly,
        guard: GradientGuard,
        scale: LossScale | None = None,
        own_time: OwnTime | None = None,
    ) -> None:
        self._config, self._assembly = config, assembly
        self._guard, self._scale, self._own_time = guard, scale, own_time
        model, parameters = assembly.model, assembly.optimizer.parameters
        self._token_coordinates = model.token_coordinates
        self._norm = GradientNorm(parameters, model.shape, independent=model.exchange.has_independent_replicas)

    def __call__(self, parts: list[LoadedBatch], finished: int) -> StepResult:
        """Perform the step that follows `finished` steps."""
        micro_batches = self._micro_batches(parts, finished)
        if self._own_time is not None:
            self._own_time.enter()
        loss = self._assembly.model.forward_backward(micro_batches)
        # With offload the gradients are in main memory; the guard's numbers stay on the loss's device.
        guarded = self._guard(self._norm().to(loss.device))
        if self._own_time is not None:
            self._own_time.leave()
        rate, optimizer = arithmetic.learning_rate(self._config, finished), self._assembly.optimizer
        device = optimizer.parameters[0].device
        optimizer.step(rate, guarded.divisor.to(device), guarded.skipped.to(device))
        optimizer.zero_grad()
        return StepResult(loss, guarded.norm, rate, guarded)

    def differentiate_keeping_buffers(self, consumed: int, finished: int, *, whole: bool = False) -> Tensor:
        """Do what `differentiate` does, but restore the model's running means afterwards."""
        model = self._assembly.model
        buffers = [buffer.clone() for buffer in model.buffers()]
        loss = self.differentiate(consumed, finished, whole=whole)
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)
        return loss

    def differentiate(self, consumed: int, finished: int, *, whole: bool) -> Tensor:
        """Return the loss of the step that follows `finished` steps, a scalar, leaving its gradient in the parameters.

        Nothing is updated. It is of the first micro-batch, or of the `whole` batch. Gradients are not averaged over
        ranks where the layout allows that.
        """
        model, feed = self._assembly.model, self._assembly.feed
        # A loader of its own, as the feed's thread may be using the run's.
        ids = Loader(self._assembly.order, self._assembly.share).ids(consumed)
        parts = [feed.load("train", part) for part in (ids if whole or model.has_pipeline else ids[:1])]
        return model.forward_backward(self._micro_batches(parts, finished), alone=True)

    def run_discarded_pass(self) -> None:
        """Run one forward and backward pass whose result is discarded, at every start, new or resumed.

        DDP rebuilds its buckets after its first backward, so that pass adds gradients in another order than all later
        ones; without this, a resumed run would differ from an uninterrupted one.
        """
        model, feed = self._assembly.model, self._assembly.feed
        buffers = [buffer.clone() for buffer in model.buffers()]
        ids = self._assembly.loader.ids(0)
        parts = [feed.load("train", part) for part in (ids if model.has_pipeline else ids[:1])]
        model.forward_backward(self._micro_batches(parts, DISCARDED))
        self._assembly.optimizer.zero_grad()
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)

    def _micro_batches(self, parts: list[LoadedBatch], finished: int) -> list[MicroBatch]:
        share = self._assembly.share
        coordinates = (share.index, *self._token_coordinates)
        return [
            MicroBatch(
                batch=part.batch,
                weight=self._scaled(len(part.ids) * share.count / share.global_batch),
                share=len(part.ids) / share.size,
                seed=derive_seed(self._config.seed, finished, number, *coordinates),
            )
            for number, part in enumerate(parts)
        ]

    def _scaled(self, weight: float) -> float | Tensor:
        return weight if self._scale is None else self._scale.value * weight
