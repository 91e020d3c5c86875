"""What the gradient's norm decides about a step: clipping, skipping, freezing, fp16's loss scale."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from training.step.clipping import ARMED_STEPS, DECAY, GradientGuard, Guarded
from training.step.loss_scale import FIRST, FLOOR, GROWTH_STEPS, LossScale
from training.step.optimizer import AdamW

CPU = torch.device("cpu")


def _norms(count: int, *, mean: float = 2.0, spread: float = 0.3, seed: int = 0) -> list[float]:
    numbers = random.Random(seed)
    return [max(0.01, numbers.gauss(mean, spread)) for _ in range(count)]


def _feed(guard: GradientGuard, norms: list[float]) -> list[Guarded]:
    return [guard(torch.tensor(norm)) for norm in norms]


def _reference(norms: list[float]) -> tuple[float, float]:
    """Weighted mean and deviation straight from their definition: the newest weighs most, weights add up to one."""
    weights = [DECAY**age for age in range(len(norms))][::-1]
    mean = sum(w * x for w, x in zip(weights, norms, strict=True)) / sum(weights)
    variance = sum(w * (x - mean) ** 2 for w, x in zip(weights, norms, strict=True)) / sum(weights)
    return mean, math.sqrt(variance)


def test_clips_at_the_usual_norm_and_four_deviations() -> None:
    norms = _norms(200)
    guard = GradientGuard(CPU, clip=1.0)
    _feed(guard, norms)
    mean, deviation = _reference(norms)
    guarded = guard(torch.tensor(10.0))
    assert guarded.mean.item() == pytest.approx(mean, rel=1e-5)
    assert guarded.divisor.item() == pytest.approx(10.0 / (mean + 4 * deviation), rel=1e-4)
    assert not guarded.skipped.item()


def test_never_clips_below_the_configured_norm() -> None:
    guard = GradientGuard(CPU, clip=1.0)
    _feed(guard, _norms(100, mean=0.1, spread=0.01))
    assert guard(torch.tensor(0.9)).divisor.item() == 1.0


@pytest.mark.parametrize(("before", "skipped"), [(ARMED_STEPS - 1, 0.0), (ARMED_STEPS, 1.0)])
def test_skips_above_twenty_times_the_mean_once_armed(before: int, skipped: float) -> None:
    guard = GradientGuard(CPU, clip=1.0)
    _feed(guard, [1.0] * before)
    assert guard(torch.tensor(19.9)).skipped.item() == 0.0
    guard = GradientGuard(CPU, clip=1.0)
    _feed(guard, [1.0] * before)
    assert guard(torch.tensor(20.1)).skipped.item() == skipped


def test_a_skipped_norm_enters_clamped() -> None:
    guard, clamped = GradientGuard(CPU, clip=1.0), GradientGuard(CPU, clip=1.0)
    _feed(guard, [1.0] * 60)
    _feed(clamped, [1.0] * 60)
    guard(torch.tensor(1e30))
    clamped(torch.tensor(20.0))
    assert guard.remember() == pytest.approx(clamped.remember())


def test_a_huge_norm_before_it_is_armed_leaves_no_trace_for_long() -> None:
    guard = GradientGuard(CPU, clip=1.0)
    _feed(guard, [1.0] * 5 + [1e30] + [1.0] * 200)
    assert guard.remember()["mean"] < 1.2


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("before", [0, 10, 80])
def test_what_is_not_finite_freezes_the_parameters(bad: float, before: int) -> None:
    guard = GradientGuard(CPU, clip=1.0)
    _feed(guard, [1.0] * before)
    known = guard.remember()
    parameter = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = AdamW([("p", parameter)], weight_decay=0.1)
    for norm in (bad, 1.0, 1.0):
        parameter.grad = torch.full((3, 3), norm)
        guarded = guard(torch.tensor(norm))
        assert (guarded.skipped.item(), guarded.frozen.item()) == (1.0, 1.0)
        optimizer.step(0.1, guarded.divisor, guarded.skipped)
    assert torch.equal(parameter, torch.ones(3, 3))
    assert optimizer.steps.item() == 0
    assert not optimizer.means["p"].any()
    if not before:
        assert known["mean"] == 0.0


def test_a_skipped_step_leaves_everything_alone() -> None:
    guard = GradientGuard(CPU, clip=1.0)
    _feed(guard, [1.0] * 60)
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = AdamW([("p", parameter)], weight_decay=0.1)
    for norm, expected in ((1.0, 1), (50.0, 1), (1.0, 2)):
        parameter.grad = torch.ones(3)
        before = parameter.detach().clone()
        guarded = guard(torch.tensor(norm))
        optimizer.step(0.1, guarded.divisor, guarded.skipped)
        assert optimizer.steps.item() == expected
        assert torch.equal(parameter, before) == (norm > 20)


def test_without_guards_it_clips_at_the_configured_norm_alone() -> None:
    guard = GradientGuard(CPU, clip=1.0, armed=False)
    _feed(guard, [2.0] * 60)
    guarded = guard(torch.tensor(500.0))
    assert (guarded.divisor.item(), guarded.skipped.item()) == (500.0, 0.0)
    assert guard(torch.tensor(math.nan)).frozen.item()


def test_zero_clips_nothing() -> None:
    guard = GradientGuard(CPU, clip=0.0)
    assert [guarded.divisor.item() for guarded in _feed(guard, [5.0] * 60)] == [1.0] * 60


def test_goes_on_from_what_it_remembers_bit_for_bit() -> None:
    norms = _norms(300, spread=1.0)
    whole = _feed(GradientGuard(CPU, clip=0.5), norms)
    first = GradientGuard(CPU, clip=0.5)
    _feed(first, norms[:77])
    told = json.loads(json.dumps(first.remember()))
    second = GradientGuard(CPU, clip=0.5)
    second.recall(told)
    for ours, theirs in zip(_feed(second, norms[77:]), whole[77:], strict=True):
        assert [value.item().hex() for value in ours] == [value.item().hex() for value in theirs]


@pytest.mark.parametrize("told", [{}, {"mean": math.nan, "variance": 0, "missing": 1}, {"mean": "x"}])
def test_what_makes_no_sense_is_not_recalled(told: dict[str, object]) -> None:
    guard = GradientGuard(CPU, clip=1.0)
    guard.recall(told)
    assert guard.remember() == {"mean": 0.0, "variance": 0.0, "missing": 1.0}


def test_an_overflow_halves_the_scale_and_skips_but_freezes_nothing() -> None:
    scale = LossScale(CPU)
    guard = GradientGuard(CPU, clip=1.0, scale=scale)
    guarded = guard(torch.tensor(math.inf))
    assert (guarded.skipped.item(), guarded.frozen.item(), scale.value.item()) == (1.0, 0.0, FIRST / 2)
    guarded = guard(torch.tensor(3.0 * FIRST / 2))
    assert (guarded.norm.item(), guarded.skipped.item()) == (3.0, 0.0)
    # Divided by the scale, and so that the norm is 1.
    assert guarded.divisor.item() == 3.0 * FIRST / 2


def test_an_overflow_without_any_scale_is_the_end() -> None:
    scale = LossScale(CPU, first=2.0)
    guard = GradientGuard(CPU, clip=1.0, scale=scale)
    assert not guard(torch.tensor(math.nan)).frozen.item()
    assert scale.value.item() == FLOOR
    assert guard(torch.tensor(math.nan)).frozen.item()


def test_a_spike_is_skipped_and_leaves_the_scale_alone() -> None:
    scale = LossScale(CPU, first=4.0)
    guard = GradientGuard(CPU, clip=1.0, scale=scale)
    _feed(guard, [4.0] * 60)
    assert guard(torch.tensor(400.0)).skipped.item()
    assert scale.value.item() == 4.0


def test_the_scale_follows_grad_scaler() -> None:
    """The very numbers of torch.amp.GradScaler, over overflows and long calm stretches."""
    ours = LossScale(CPU)
    theirs = torch.amp.GradScaler("cpu", growth_interval=GROWTH_STEPS)
    parameter = torch.nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    numbers = random.Random(3)
    for step in range(GROWTH_STEPS * 2 + 50):
        overflow = step < 40 and numbers.random() < 0.3
        theirs.scale(parameter * 1.0).backward()
        assert parameter.grad is not None
        if overflow:
            parameter.grad.fill_(math.inf)
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.update(torch.tensor(float(overflow)))
        if step == 500:
            told = json.loads(json.dumps(ours.remember()))
            ours = LossScale(CPU)
            ours.recall(told)
        assert ours.value.item() == theirs.get_scale()


def test_first_batches_without_a_gradient_condemn_no_later_one() -> None:
    guard = GradientGuard(CPU, clip=1.0)
    found = _feed(guard, [0.0, *_norms(3 * ARMED_STEPS)])
    assert not any(told.skipped.item() for told in found)
