"""Simulate a run with occasional failures: what it loses with Cadence's decisions, and with the best fixed interval."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

from training.checkpoint import cadence
from training.checkpoint.cadence import Cadence, Mtbf, best_interval

STEP = 1.0
"""Seconds of a step."""


def least_loss(cost: float, tau: float) -> float:
    """Return the smallest part of its work that a run loses with any constant interval: exact, no simulation.

    Saving each T seconds, T + C of time must pass without a failure; where failures come at random, one each τ, that
    takes τ(e^((T+C)/τ) − 1) seconds in the mean.
    """
    intervals = [best_interval(cost, tau) * 1.02**power for power in range(-100, 101)]
    return min(tau * math.expm1((every + cost) / tau) / every - 1 for every in intervals)


def lost(cost: float, tau: float, *, failures: int, seed: int = 0) -> float:
    """Simulate a run that saves as Cadence decides, until it has failed so often; return the share of work lost.

    Its first minute, before anything is measured, counts. Half of a save's cost is a stall, half slower steps.
    """
    numbers = random.Random(seed)
    # As many as of each length as there should be: so that luck with them does not hide the effect.
    gaps = [-tau * math.log(1 - (index + 0.5) / failures) for index in range(failures)]
    numbers.shuffle(gaps)
    done = spent = 0.0
    memory: Mapping[str, Any] = {}
    for gap in gaps:  # one incarnation, which begins where the one before had last saved
        decides = Cadence("auto", Mtbf(tau, "config"), clock=lambda: 0.0)
        decides.load_state_dict(memory)
        for _ in range(cadence.MIN_OUTSIDE_STEPS):
            decides.note_step(STEP, saving=False)
        now = 0.0
        while now + (every := max(STEP, decides.interval)) + cost < gap:
            now, done = now + every + cost, done + every
            memory = decides.state_dict()
            noise = 1 + 0.2 * (numbers.random() - 0.5)
            decides.note_begun()
            decides.note_step(STEP + cost / 2 * noise, saving=True)
            decides.note_written(stall=cost / 2, write=cost / 2)
        spent += gap
    return spent / done - 1
