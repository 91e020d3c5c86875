"""What the gradient's norm decides about a step, on the device: how far it is clipped, and whether it counts at all.

Of the norms before clipping a bias-corrected exponential mean μ and standard deviation σ are kept. Once ARMED_STEPS
finite norms are in them, a step is clipped at max(clip, μ + 4σ) and skipped if its norm is over 20 μ: the optimizer's
kernel is told of an infinity and leaves parameters, moments and step count alone.

A norm over 20 μ never enters μ and σ, whether it is skipped or the guard is not armed yet: so no spike, and no row of
them, moves the limit. But LEVEL_STEPS norms in a row, the first of them more than 20 times above μ or below it and the
others within 4 times of that one, are no spikes: the last of them becomes μ, and its step counts. While steps are
skipped the parameters stand still, so that a run that runs away does not pass for this by itself. A smaller change is
learned by the mean alone, to nine tenths after 115 steps. Nothing here waits for the device.
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
LEVEL_STEPS = 8
"""Fewer than end a run (training.guards.guards.MOST_SKIPS), so that a new level is learned before it would be."""
LEVEL_RATIO = 4.0
LARGEST = torch.finfo(torch.float32).max


class Guarded(NamedTuple):
    """What the guard decided about one step; float32 scalars on the device."""

    norm: Tensor
    """The gradient's norm before clipping, without the loss scale."""
    divisor: Tensor
    """What the optimizer divides the gradients by."""
    skipped: Tensor
    """1: the step left the parameters alone."""
    limit: Tensor
    """The norm above which it would be skipped; the largest number there is while the guard is not armed."""
    mean: Tensor
    """The mean μ of the norms before this one."""
    frozen: Tensor
    """1: a norm was not finite, and no step has counted since, so that the parameters are still those it came from."""
    learned: Tensor
    """1: with this norm, others in a row have become what is usual."""


class GradientGuard:
    """Part of what a checkpoint remembers; float32 throughout, so that a resume goes on with the very same bits."""

    def __init__(
        self, device: torch.device, *, clip: float, armed: bool = True, scale: LossScale | None = None
    ) -> None:
        """`clip`: 0 clips nothing. `armed`: False clips at `clip` alone and skips only what is not finite."""
        self._clips, self._armed, self._scale = clip > 0, armed, scale
        # An operation with a number in it takes twice as long as one of tensors alone.
        numbers = [0.0, 1.0, clip, LARGEST, SKIP_MEANS, DECAY, DECAY ** (ARMED_STEPS - 0.5)]
        self._zero, self._one, self._floor, self._no_limit, self._skip_means, self._decay, self._enough = torch.tensor(
            numbers, device=device
        ).unbind()
        rows = [LEVEL_STEPS, math.log(SKIP_MEANS), math.log(LEVEL_RATIO), math.inf]
        self._row, self._far, self._apart, self._none = torch.tensor(rows, device=device).unbind()
        self._portion = self._one - self._decay
        self._mean, self._variance = self._zero, self._zero
        self._missing = self._one
        """DECAY to the power of how many norms are in them."""
        self._first, self._alike = self._none, self._zero
        """A row of norms whose first was far from μ, and the others near to it: the logarithm of the first; how many
        they are."""
        self._frozen = self._zero

    def __call__(self, norm: Tensor) -> Guarded:
        """`norm`: of the whole gradient as it lies in the parameters, the loss scale included; it needs no gradient."""
        scale = self._scale
        norm = norm if scale is None else norm / scale.value
        mean = self._mean
        # A mean of nothing, as when the first batches had no gradient, says nothing of what is usual.
        unknown = mean <= self._zero
        learned = self._learn(norm, unknown)
        armed = self._missing < self._enough
        usual = torch.where(unknown, self._no_limit, self._mean * self._skip_means)
        limit = torch.where(armed, usual, self._no_limit) if self._armed else self._no_limit
        infinite = torch.where(norm <= self._no_limit, self._zero, self._one)  # NaN compares as false
        self._note_infinite(infinite)
        skipped = torch.where(norm <= limit, self._frozen, self._one)
        if scale is not None:
            skipped = torch.maximum(skipped, infinite)
            scaled = scale.value.clone()
            scale.update(infinite)
        divisor = self._divisor(norm, armed)
        # Before the guard is armed nothing is skipped, but huge norms must not make all later ones look small.
        self._enter(torch.fmin(norm, usual), torch.where(norm <= usual, self._one, self._zero))
        divisor = divisor if scale is None else divisor * scaled
        return Guarded(norm, divisor, skipped, limit, mean, self._frozen, learned)

    def _learn(self, norm: Tensor, unknown: Tensor) -> Tensor:
        """Follow the row of norms that begins with one far from the mean; true: with this one it is what is usual."""
        # What is not finite is near to nothing: it ends a row, and begins none that could go on.
        size = norm.log()
        usual = (self._mean.log().sub_(size).abs_() < self._far).logical_or_(unknown)
        alike = (size - self._first).abs_() < self._apart
        self._alike = torch.where(alike, self._alike + self._one, torch.where(usual, self._zero, self._one))
        self._first = torch.where(alike, self._first, torch.where(usual, self._none, size))
        learned = self._alike == self._row
        self._mean = torch.where(learned, norm, self._mean)
        self._variance = torch.where(learned, self._zero, self._variance)
        return learned

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
        known = torch.stack((self._mean, self._variance, self._missing, self._first, self._alike)).tolist()
        mean, variance, missing, first, alike = known  # float32 as float64: nothing is rounded
        told = {"mean": mean, "variance": variance, "missing": missing}
        return {**told, "first": first if math.isfinite(first) else None, "alike": alike}

    def recall(self, told: Mapping[str, Any]) -> None:
        """Goes on from what a checkpoint remembers; an older version's knows of no row: then none has begun."""
        numbers = [told.get("mean"), told.get("variance"), told.get("missing"), told.get("alike", 0.0)]
        first = told.get("first")
        if not all(isinstance(value, int | float) and 0 <= value < math.inf for value in numbers):
            return
        numbers.insert(3, first if isinstance(first, int | float) else math.inf)
        known = torch.tensor(numbers, dtype=torch.float32, device=self._one.device)
        self._mean, self._variance, self._missing, self._first, self._alike = known.unbind()
