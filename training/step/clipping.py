"""What the gradient's norm decides about a step, on the device: how far it is clipped, and whether it counts at all.

Of the norms before clipping a bias-corrected exponential mean μ and standard deviation σ are kept; each enters as at
most 20 μ. Once ARMED_STEPS finite norms are in, a step is clipped at max(clip, μ + 4σ) and skipped if its norm is over
20 μ: the optimizer's kernel is told of an infinity and leaves parameters, moments and step count alone. Nothing here
waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from training.step.loss_scale import LossScale

DECAY = 0.98
ARMED_STEPS = 50
CLIP_DEVIATIONS = 4.0
SKIP_MEANS = 20.0
LARGEST = torch.finfo(torch.float32).max


class Guarded(NamedTuple):
    """Of one step; float32 scalars on the device."""

    norm: Tensor
    """Before clipping, without the loss scale."""
    divisor: Tensor
    """What the optimizer divides the gradients by."""
    skipped: Tensor
    """1: the step left the parameters alone."""
    limit: Tensor
    """The norm above which it would be skipped; the largest number there is while the guard is not armed."""
    mean: Tensor
    frozen: Tensor
    """1: a norm was not finite, and no step has counted since, so that the parameters are still those it came from."""


class GradientGuard:
    """Part of what a checkpoint remembers; float32 throughout, so that a resume goes on with the very same bits."""

    def __init__(
        self, device: torch.device, *, clip: float, armed: bool = True, scale: LossScale | None = None
    ) -> None:
        """`clip`: 0 clips nothing. `armed`: False clips at `clip` alone and skips only what is not finite."""
        self._clips, self._armed, self._scale = clip > 0, armed, scale
        # An operation with a number in it takes twice as long as one of tensors alone.
        self._zero, self._one, self._floor, self._no_limit, self._skip_means, self._decay, self._enough = torch.tensor(
            [0.0, 1.0, clip, LARGEST, SKIP_MEANS, DECAY, DECAY ** (ARMED_STEPS - 0.5)], device=device
        ).unbind()
        self._portion = self._one - self._decay
        self._mean, self._variance = self._zero, self._zero
        self._missing = self._one
        """DECAY to the power of how many norms are in them."""
        self._frozen = self._zero

    def __call__(self, norm: Tensor) -> Guarded:
        """`norm`: of the whole gradient as it lies in the parameters, the loss scale included; it needs no gradient."""
        scale = self._scale
        norm = norm if scale is None else norm / scale.value
        mean = self._mean
        armed = self._missing < self._enough
        # A mean of nothing, as when the first batches had no gradient, says nothing of what is usual.
        usual = torch.where(mean > self._zero, mean * self._skip_means, self._no_limit)
        limit = torch.where(armed, usual, self._no_limit) if self._armed else self._no_limit
        infinite = torch.where(norm <= self._no_limit, self._zero, self._one)  # NaN compares as false
        self._note_infinite(infinite)
        skipped = torch.where(norm <= limit, self._frozen, self._one)
        if scale is not None:
            skipped = torch.maximum(skipped, infinite)
            scaled = scale.value.clone()
            scale.update(infinite)
        divisor = self._divisor(norm, armed)
        # Before the guard is armed nothing is skipped, but one huge norm must not make all later ones look small.
        self._enter(torch.fmin(norm, usual), self._one - infinite)
        divisor = divisor if scale is None else divisor * scaled
        return Guarded(norm, divisor, skipped, limit, mean, self._frozen)

    def _note_infinite(self, infinite: Tensor) -> None:
        """A loss scale may still be lowered; without one, or at its lowest, it is the end."""
        final = infinite if self._scale is None else infinite * self._scale.at_floor
        self._frozen = torch.maximum(self._frozen, final)

    def _divisor(self, norm: Tensor, armed: Tensor) -> Tensor:
        if not self._clips:
            return self._one
        most = self._floor
        if self._armed:
            usual = torch.add(self._mean, self._variance.sqrt(), alpha=CLIP_DEVIATIONS)
            most = torch.maximum(torch.where(armed, usual, most), most)
        return torch.maximum(norm / most, self._one)

    def _enter(self, norm: Tensor, counts: Tensor) -> None:
        """Weights that add up to one from the first step on are the bias correction. `counts`: 0 changes nothing."""
        weight = self._portion / (self._one - self._missing * self._decay) * counts
        apart = norm - self._mean
        moved = weight * apart
        spread = torch.addcmul(self._variance, moved, apart)
        self._mean = self._mean + moved
        self._variance = torch.addcmul(spread, spread, weight, value=-1)
        self._missing = torch.addcmul(self._missing, self._missing, counts, value=DECAY - 1)

    def remember(self) -> dict[str, Any]:
        known = torch.stack((self._mean, self._variance, self._missing)).tolist()
        return dict(zip(("mean", "variance", "missing"), known, strict=True))  # float32 as float64: nothing is rounded

    def recall(self, told: Mapping[str, Any]) -> None:
        values = [told.get(name) for name in ("mean", "variance", "missing")]
        if all(isinstance(value, int | float) and 0 <= value < math.inf for value in values):
            known = torch.tensor(values, dtype=torch.float32, device=self._one.device)
            self._mean, self._variance, self._missing = known.unbind()
