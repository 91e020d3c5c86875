"""Decide on the device, by the gradient's norm, how far a step is clipped and whether it is applied at all.

A bias-corrected exponential mean μ and standard deviation σ of the norms before clipping are tracked. Once they include
ARMED_STEPS finite norms, a step is clipped at max(clip, μ + 4σ), and skipped if its norm is over 20 μ: the optimizer's
kernel is passed an infinity and leaves parameters, moments and step count unchanged.

A norm over 20 μ never enters μ and σ, whether it is skipped or the guard is not armed yet: so no spike, and no sequence
of spikes, moves the limit. But LEVEL_STEPS consecutive norms, the first of them more than 20 times above or below μ and
the others within a factor of 4 of that one, are no spikes: the last of them becomes μ, and its step counts. While steps
are skipped the parameters do not change, so a diverging run does not pass for this. The mean alone follows a smaller
change, by nine tenths after 115 steps. Nothing here waits for the device.
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
"""Fewer than end a run (training.guards.guards.MAX_SKIPS), so that a new level is established before that."""
LEVEL_RATIO = 4.0
MAX_FLOAT = torch.finfo(torch.float32).max


class GuardDecision(NamedTuple):
    """The guard's decision about one step; float32 scalars on the device."""

    norm: Tensor
    """The gradient's norm before clipping, without the loss scale."""
    divisor: Tensor
    """The number by which the optimizer divides the gradients."""
    skipped: Tensor
    """1: the step leaves the parameters unchanged."""
    limit: Tensor
    """The norm above which the step is skipped; the largest float while the guard is not armed."""
    mean: Tensor
    """The mean μ of the norms before this one."""
    frozen: Tensor
    """1: a norm was not finite, and no step has been applied since, so the parameters are still those that caused
    it.
    """
    learned: Tensor
    """1: this norm completes a sequence that sets a new level."""


class GradientGuard:
    """Decides about each step.

    Its state is saved in checkpoints, in float32 so that a resume continues with the same bits.
    """

    def __init__(
        self, device: torch.device, *, clip: float, armed: bool = True, scale: LossScale | None = None
    ) -> None:
        """`clip`: 0 for no clipping. `armed`: False clips at `clip` only, and skips only steps that are not finite."""
        self._clips, self._armed, self._scale = clip > 0, armed, scale
        # An operation with a Python number takes twice as long as one of tensors only.
        numbers = [0.0, 1.0, clip, MAX_FLOAT, SKIP_MEANS, DECAY, DECAY ** (ARMED_STEPS - 0.5)]
        self._zero, self._one, self._floor, self._no_limit, self._skip_means, self._decay, self._enough = torch.tensor(
            numbers, device=device
        ).unbind()
        rows = [LEVEL_STEPS, math.log(SKIP_MEANS), math.log(LEVEL_RATIO), math.inf]
        self._level_steps, self._log_skip_ratio, self._log_level_ratio, self._infinity = torch.tensor(
            rows, device=device
        ).unbind()
        self._portion = self._one - self._decay
        self._mean, self._variance = self._zero, self._zero
        self._missing = self._one
        """DECAY to the power of the number of norms in them."""
        self._level_first, self._level_count = self._infinity, self._zero
        """A sequence of norms whose first was far from μ and the others close to the first: logarithm of the first, and
        their number."""
        self._frozen = self._zero

    def __call__(self, norm: Tensor) -> GuardDecision:
        """Return the decision.

        `norm`: of the whole gradient in the parameters, including the loss scale; without autograd.
        """
        scale = self._scale
        norm = norm if scale is None else norm / scale.value
        mean = self._mean
        # A mean of zero, as when the first batches had no gradient, is no level to compare with.
        unknown = mean <= self._zero
        learned = self._follow_level(norm, unknown)
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
        # Before the guard is armed nothing is skipped, but huge norms must not make later ones look small.
        self._update(torch.fmin(norm, usual), torch.where(norm <= usual, self._one, self._zero))
        divisor = divisor if scale is None else divisor * scaled
        return GuardDecision(norm, divisor, skipped, limit, mean, self._frozen, learned)

    def _follow_level(self, norm: Tensor, unknown: Tensor) -> Tensor:
        """Follow a sequence of norms that begins far from the mean.

        Return true if this one completes it and sets a new level.
        """
        # A norm that is not finite is close to none: it ends a sequence and cannot begin another.
        size = norm.log()
        is_usual = (self._mean.log().sub_(size).abs_() < self._log_skip_ratio).logical_or_(unknown)
        is_similar = (size - self._level_first).abs_() < self._log_level_ratio
        self._level_count = torch.where(
            is_similar, self._level_count + self._one, torch.where(is_usual, self._zero, self._one)
        )
        self._level_first = torch.where(is_similar, self._level_first, torch.where(is_usual, self._infinity, size))
        learned = self._level_count == self._level_steps
        self._mean = torch.where(learned, norm, self._mean)
        self._variance = torch.where(learned, self._zero, self._variance)
        return learned

    def _note_infinite(self, infinite: Tensor) -> None:
        """Freeze the parameters after a non-finite norm, unless the loss scale can still be lowered."""
        final = infinite if self._scale is None else infinite * self._scale.at_floor
        self._frozen = torch.maximum(self._frozen, final)

    def _divisor(self, norm: Tensor, armed: Tensor) -> Tensor:
        if not self._clips:
            return self._one
        limit = self._floor
        if self._armed:
            usual = torch.add(self._mean, self._variance.sqrt(), alpha=CLIP_DEVIATIONS)
            limit = torch.maximum(torch.where(armed, usual, limit), limit)
        return torch.maximum(norm / limit, self._one)

    def _update(self, norm: Tensor, counts: Tensor) -> None:
        """Update mean and variance.

        `counts`: 0 changes nothing. Bias correction: the weights add up to one from the first step.
        """
        weight = self._portion / (self._one - self._missing * self._decay) * counts
        difference = norm - self._mean
        moved = weight * difference
        spread = torch.addcmul(self._variance, moved, difference)
        self._mean = self._mean + moved
        self._variance = torch.addcmul(spread, spread, weight, value=-1)
        self._missing = torch.addcmul(self._missing, self._missing, counts, value=DECAY - 1)

    def state_dict(self) -> dict[str, Any]:
        values = torch.stack((self._mean, self._variance, self._missing, self._level_first, self._level_count)).tolist()
        mean, variance, missing, first, alike = values  # float32 as float64: nothing is rounded
        state = {"mean": mean, "variance": variance, "missing": missing}
        return {**state, "first": first if math.isfinite(first) else None, "alike": alike}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state from a checkpoint; one of an older version has no sequence, so none has begun."""
        numbers = [state.get("mean"), state.get("variance"), state.get("missing"), state.get("alike", 0.0)]
        first = state.get("first")
        if not all(isinstance(value, int | float) and 0 <= value < math.inf for value in numbers):
            return
        numbers.insert(3, first if isinstance(first, int | float) else math.inf)
        values = torch.tensor(numbers, dtype=torch.float32, device=self._one.device)
        self._mean, self._variance, self._missing, self._level_first, self._level_count = values.unbind()
