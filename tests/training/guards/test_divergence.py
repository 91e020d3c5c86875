"""Test that diverged runs are distinguished from noisy, spiky or warming-up ones."""

from __future__ import annotations

import json
import math
import random

import pytest

from training.guards.divergence import ARMED_STEPS, Divergence

Curve = list[float]
WARMUP = 100


def _learning(steps: int, *, start: float = 10.8, end: float = 3.0, pace: float = 400.0) -> Curve:
    """Return losses like a language model's: steep, then flat."""
    return [end + (start - end) * (1 + step / pace) ** -1.5 for step in range(steps)]


def _noisy(curve: Curve, spread: float, seed: int) -> Curve:
    numbers = random.Random(seed)
    return [loss + numbers.gauss(0, spread) for loss in curve]


def _stops(curve: Curve, warmup: int = WARMUP) -> int | None:
    """The step at which it stops, or None."""
    detector = Divergence(warmup)
    return next((step for step, loss in enumerate(curve) if detector.note(loss)), None)


def _with(curve: Curve, at: int, values: Curve) -> Curve:
    return [*curve[:at], *values, *curve[at + len(values) :]]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("spread", [0.02, 0.3, 1.0])
def test_noisy_learning_and_its_plateau_are_no_divergence(spread: float, seed: int) -> None:
    assert _stops(_noisy(_learning(6000), spread, seed)) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_plateau_near_zero_is_none(seed: int) -> None:
    """A classifier that is nearly always right: most losses tiny, some a thousand times larger."""
    numbers = random.Random(seed)
    flat = [1e-3 * math.exp(numbers.gauss(0, 2)) for _ in range(4000)]
    learning = [2.3 * math.exp(-step / 60) for step in range(300)]
    assert _stops([*learning, *flat], warmup=20) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_run_that_learns_nothing_is_none(seed: int) -> None:
    assert _stops(_noisy([4.6] * 5000, 0.4, seed)) is None


@pytest.mark.parametrize(("height", "steps"), [(20.0, 1), (1e6, 10), (9.0, 30), (1e12, 50)])
def test_spikes_that_recover_are_none(height: float, steps: int) -> None:
    curve = _noisy(_learning(3000), 0.1, 1)
    spiky = _with(curve, 1500, [height] * steps)
    for at in (700, 1000, 2200):
        spiky = _with(spiky, at, [height] * (steps // 2))
    assert _stops(spiky) is None


def test_a_spike_that_decays_slowly_is_none() -> None:
    tail = [3.4 + 6 * math.exp(-step / 15) for step in range(150)]
    assert _stops(_with(_noisy(_learning(3000), 0.1, 2), 1500, tail)) is None


def test_a_rise_during_the_warmup_is_none() -> None:
    rising = [10.8 + 4 * math.sin(step / WARMUP * math.pi) for step in range(WARMUP)]
    assert _stops([*rising, *_noisy(_learning(2000), 0.1, 3)]) is None


def test_overfitting_by_a_little_is_none() -> None:
    assert _stops([*_learning(2000), *(3.0 + step / 10_000 for step in range(3000))]) is None


DIVERGED = {
    "up to where it began, and stays": [10.8] * 400,
    "explodes": [3.0 * 1.05**step for step in range(400)],
    "rises slowly without end": [3.2 + step / 100 for step in range(1500)],
    "forgets most of it": [7.5] * 400,
}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("after", DIVERGED.values(), ids=DIVERGED)
def test_a_loss_that_leaves_for_good_is_found(after: Curve, seed: int) -> None:
    curve = [*_learning(2000), *after]
    stopped = _stops(_noisy(curve, 0.1, seed))
    assert stopped is not None
    assert 2000 <= stopped <= 2000 + 600
    if after[50] > 7:
        assert stopped <= 2000 + 150


def test_soon_after_the_warmup_it_is_found_too() -> None:
    curve = [*_learning(WARMUP + ARMED_STEPS + 20), *([14.0] * 200)]
    assert _stops(_noisy(curve, 0.1, 0)) is not None


def test_what_is_not_finite_is_not_its_business() -> None:
    assert _stops([*_learning(500), *([math.nan] * 300)]) is None


def test_goes_on_from_what_it_remembers() -> None:
    curve = _noisy([*_learning(800), *([10.8] * 300)], 0.1, 0)
    whole = _stops(curve)
    for cut in (50, 400, 850):
        first = Divergence(WARMUP)
        assert not any(first.note(loss) for loss in curve[:cut])
        second = Divergence(WARMUP)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert next(step for step, loss in enumerate(curve[cut:], cut) if second.note(loss)) == whole
