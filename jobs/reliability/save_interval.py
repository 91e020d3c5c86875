"""Calculate the best save interval and the resulting share of useful time, for random failures. No Django.

A period of T seconds is a save of C and T − C of training. Failures come at random, on average one in M seconds of
allocated time, also during saves and restarts; each takes the run back to its last save, and R seconds until it trains
again. Then a period takes M·exp(R/M)·(exp(T/M) − 1) seconds on average, which is exact (Daly, 2006,
doi 10.1016/j.future.2004.11.016).
"""

from __future__ import annotations

import math

MIN_GAIN = 0.001
"""Smallest share of the time worth recommending a change for."""
_MAX_EXPONENT = 700.0
_TINY = 1e-12  # below this, floating point leaves only the root of 2c


def useful_share(period: float, *, cost: float, mtbf: float, restart: float = 0.0) -> float:
    """Return the share of allocated time that is useful training if the run saves every `period` seconds."""
    if period <= cost or (period + restart) / mtbf > _MAX_EXPONENT:
        return 0.0
    return (period - cost) / (mtbf * math.exp(restart / mtbf) * math.expm1(period / mtbf))


def best_period(cost: float, mtbf: float) -> float:
    """Return the period with the largest useful share: T/M − C/M = 1 − exp(−T/M). Restarts cost the same at any period.

    Newton's method from above, where the function is convex, descends to the root without passing it.
    """
    c = cost / mtbf
    if c < _TINY:
        return young(cost, mtbf)
    x = c + math.sqrt(2 * c)
    for _ in range(50):
        step = (x - c + math.expm1(-x)) / -math.expm1(-x)
        x -= step
        if step < 1e-12 * x:
            break
    return x * mtbf


def young(cost: float, mtbf: float) -> float:
    """Return √(2CM), the limit of the best period for small C (Young, 1974, doi 10.1145/361147.361115)."""
    return math.sqrt(2 * cost * mtbf)
