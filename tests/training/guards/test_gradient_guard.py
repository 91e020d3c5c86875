"""Test what the gradient's norm decides about a step: clipping, skipping, freezing, fp16's loss scale."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from training.step.clipping import ARMED_STEPS, DECAY, GradientGuard, GuardDecision
from training.step.loss_scale import FIRST, FLOOR, GROWTH_STEPS, LossScale
from training.step.optimizer import AdamW

CPU = torch.device("cpu")


def _norms(count: int, *, mean: float = 2.0, spread: float = 0.3, seed: int = 0) -> list[float]:
    numbers = random.Random(seed)
    return [max(0.01, numbers.gauss(mean, spread)) for _ in range(count)]


def _feed(guard: GradientGuard, norms: list[float]) -> list[GuardDecision]:
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


def test_a_skipped_norm_moves_nothing() -> None:
    guard, other = GradientGuard(CPU, clip=1.0), GradientGuard(CPU, clip=1.0)
    _feed(guard, [1.0] * 60)
    _feed(other, [1.0] * 60)
    _feed(guard, [1e30, 1.1, 40.0, 1.0])
    _feed(other, [1.1, 1.0])
    with_spikes, without = guard.state_dict(), other.state_dict()
    assert all(with_spikes[name] == without[name] for name in ("mean", "variance", "missing"))


def test_huge_norms_before_it_is_armed_leave_no_trace() -> None:
    for spikes in ([1e30], [100.0, 2000.0, 40_000.0]):
        guard = GradientGuard(CPU, clip=1.0)
        _feed(guard, [1.0] * 5 + spikes + [1.0] * 60)
        assert guard.state_dict()["mean"] == pytest.approx(1.0)
    first = GradientGuard(CPU, clip=1.0)
    _feed(first, [1e6] + [1.0] * 60)
    assert first.state_dict()["mean"] == pytest.approx(1.0)


# Planted spikes, and levels that have changed, compared with the rule in plain Python.


class Plain:
    """The rule, norm by norm, in double precision."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.mean = 0.0
        self.count = 0
        self.row: list[float] = []

    def skips(self, norm: float) -> bool:
        far = self.mean > 0 and (norm >= 20 * self.mean or norm <= self.mean / 20)
        if self.row and 1 / 4 < norm / self.row[0] < 4:
            self.row.append(norm)
        else:
            self.row = [norm] if far else []
        if len(self.row) == 8:
            self.mean = norm
        if self.mean and norm > 20 * self.mean:
            return self.count >= ARMED_STEPS
        weight = (1 - DECAY) / (1 - DECAY ** (self.count + 1))
        self.mean += weight * (norm - self.mean)
        self.count += 1
        return False


def _planted(kind: str) -> tuple[list[float], set[int], int]:
    """Norms of 400 steps, the places of the spikes that must be skipped, and how many others may be."""
    rough = random.Random(kind)
    norms = [math.exp(rough.gauss(0.0, 0.3)) for _ in range(400)]
    spaced = range(60, 400, 20)
    spikes: dict[str, dict[int, float]] = {
        "17 alike": dict.fromkeys(spaced, 37.0),
        "17 growing": {step: 30.0 * 1.5**i for i, step in enumerate(spaced)},
        "17 of any height": {step: 30.0 * 10 ** rough.uniform(0, 6) for step in spaced},
        "clusters of seven": {start + i: 50.0 for start in (60, 130, 200, 270, 340) for i in range(7)},
        "a cluster that grows": {100 + i: 40.0 * 3**i for i in range(12)},
        "as it is armed": {50: 40.0, 51: 60.0, 53: 1e9},
        "before and after": {**dict.fromkeys((0, 7, 8, 9, 20, 30, 49), 1000.0), **{60: 50.0, 61: 1000.0}},
    }
    if kind in spikes:
        for step, norm in spikes[kind].items():
            norms[step] = norm
        return norms, {step for step in spikes[kind] if step >= ARMED_STEPS}, 0
    factor = {"up 3": 3.0, "up 30": 30.0, "up 3000": 3000.0, "down 3": 1 / 3, "down 30": 1 / 30}[kind]
    return [*norms[:200], *(norm * factor for norm in norms[200:])], set(), 7 if factor > 20 else 0


KINDS = (
    "17 alike", "17 growing", "17 of any height", "clusters of seven", "a cluster that grows", "as it is armed",
    "before and after", "up 3", "up 30", "up 3000", "down 3", "down 30",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_planted_spikes_are_skipped_and_nothing_else(kind: str) -> None:
    norms, spikes, others = _planted(kind)
    skipped = {step for step, found in enumerate(_feed(GradientGuard(CPU, clip=1.0), norms)) if found.skipped.item()}
    # Norms that enter count towards arming; a spike before it does not, so it is armed some steps later.
    armed_later = {step for step in spikes if step < ARMED_STEPS + 10} if kind.startswith(("before", "as")) else set()
    assert spikes - armed_later <= skipped
    assert len(skipped - spikes) <= others
    plain = Plain()
    assert skipped == {step for step, norm in enumerate(norms) if plain.skips(norm)}


@pytest.mark.parametrize("factor", [30.0, 1e4, 1 / 30, 1e-4])
def test_a_level_that_has_changed_is_learned_with_its_eighth_step(factor: float) -> None:
    guard = GradientGuard(CPU, clip=0.0)
    _feed(guard, _norms(200, mean=1.0))
    found = _feed(guard, [factor * norm for norm in _norms(60, mean=1.0, spread=0.1, seed=1)])
    assert [bool(step.skipped.item()) for step in found] == [factor > 1] * 7 + [False] * 53
    assert [step for step, item in enumerate(found, 1) if item.learned.item()] == [8]
    assert guard.state_dict()["mean"] == pytest.approx(factor, rel=0.5)
    assert guard(torch.tensor(30.0 * factor)).skipped.item(), "and spikes are seen from there"


@pytest.mark.parametrize("factor", [3.0, 15.0, 1 / 3])
def test_a_smaller_change_is_learned_by_the_mean(factor: float) -> None:
    guard = GradientGuard(CPU, clip=0.0)
    _feed(guard, [1.0] * 200)
    assert not any(found.skipped.item() for found in _feed(guard, [factor] * 115))
    assert guard.state_dict()["mean"] == pytest.approx(factor + 0.1 * (1 - factor), rel=0.02)


def test_what_was_no_number_ends_a_row() -> None:
    scale = LossScale(CPU)
    guard = GradientGuard(CPU, clip=0.0, scale=scale)
    _feed(guard, [FIRST] * 60)
    rows = [40.0] * 7 + [math.inf] + [40.0] * 7
    found = [guard(torch.tensor(norm) * scale.value) for norm in rows]
    assert all(step.skipped.item() for step in found)
    assert not any(step.learned.item() for step in found)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("before", [0, 10, 80])
def test_what_is_not_finite_freezes_the_parameters(bad: float, before: int) -> None:
    guard = GradientGuard(CPU, clip=1.0)
    _feed(guard, [1.0] * before)
    state = guard.state_dict()
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
        assert state["mean"] == 0.0


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
    norms[74:84] = [300.0] * 10  # in the midst of a row of far ones
    whole = _feed(GradientGuard(CPU, clip=0.5), norms)
    first = GradientGuard(CPU, clip=0.5)
    _feed(first, norms[:77])
    payload = json.loads(json.dumps(first.state_dict()))
    second = GradientGuard(CPU, clip=0.5)
    second.load_state_dict(payload)
    assert [bool(step.learned) for step in whole[80:83]] == [False, True, False]
    for ours, theirs in zip(_feed(second, norms[77:]), whole[77:], strict=True):
        assert [float(value).hex() for value in ours] == [float(value).hex() for value in theirs]


def test_goes_on_from_what_an_older_version_remembered() -> None:
    guard = GradientGuard(CPU, clip=0.0)
    guard.load_state_dict({"mean": 2.0, "variance": 0.25, "missing": 0.1})
    assert not guard(torch.tensor(39.0)).skipped.item()
    assert [bool(found.skipped.item()) for found in _feed(guard, [100.0] * 9)] == [True] * 7 + [False] * 2


@pytest.mark.parametrize("state", [{}, {"mean": math.nan, "variance": 0, "missing": 1}, {"mean": "x"}])
def test_what_makes_no_sense_is_not_recalled(state: dict[str, object]) -> None:
    guard = GradientGuard(CPU, clip=1.0)
    guard.load_state_dict(state)
    assert guard.state_dict() == GradientGuard(CPU, clip=1.0).state_dict()


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


@pytest.mark.lengthy
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
            payload = json.loads(json.dumps(ours.state_dict()))
            ours = LossScale(CPU)
            ours.load_state_dict(payload)
        assert ours.value.item() == theirs.get_scale()


def test_first_batches_without_a_gradient_skip_no_later_batch() -> None:
    guard = GradientGuard(CPU, clip=1.0)
    found = _feed(guard, [0.0, *_norms(3 * ARMED_STEPS)])
    assert not any(report.skipped.item() for report in found)
