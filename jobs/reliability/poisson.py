"""Counts of rare events: exact 95 % intervals and tails, by the incomplete gamma function. No Django.

The interval of a mean by one count is Garwood's (1936, Biometrika 28, 437): its ends are the means of which the count,
or fewer, or more, has 2.5 %; in tables it is written by quantiles of χ² with 2n and 2n + 2 degrees of freedom. It
covers the truth at least 95 % of the time, at small counts rather more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

OUTSIDE = 0.05
_CLOSE = 1e-15
_MOST_TERMS = 1_000_000


def at_least(count: int, mean: float) -> float:
    """The chance of so many or more, where `mean` are expected."""
    return 1.0 if count <= 0 else lower_gamma(float(count), mean)


def at_most(count: int, mean: float) -> float:
    """The chance of so many or fewer."""
    return 0.0 if count < 0 else upper_gamma(count + 1.0, mean)


@lru_cache(maxsize=4096)
def interval(count: int, outside: float = OUTSIDE) -> tuple[float, float]:
    """The means between which the true one is, but for `outside` of all cases."""
    low = 0.0 if count == 0 else _mean_where(lambda mean: at_least(count, mean) - outside / 2, count)
    return low, _mean_where(lambda mean: outside / 2 - at_most(count, mean), count + 1)


def _mean_where(rises_through_zero: Callable[[float], float], about: float) -> float:
    """Where a function of the mean that rises is 0, which is somewhere about this count."""
    spread = 4 * math.sqrt(about) + 4
    low, high = max(0.0, about - spread), about + spread
    while rises_through_zero(low) > 0:
        low /= 2
    while rises_through_zero(high) < 0:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (low, middle) if rises_through_zero(middle) > 0 else (middle, high)
    return (low + high) / 2


def lower_gamma(a: float, x: float) -> float:
    """The regularised lower incomplete gamma function P(a, x): by its series, or as what is left of the upper one.

    Abramowitz and Stegun 6.5.29 and 6.5.31, which converge fast on either side of x = a + 1.
    """
    if x <= 0:
        return 0.0
    return _series(a, x) if x < a + 1 else 1.0 - _fraction(a, x)


def upper_gamma(a: float, x: float) -> float:
    """Q(a, x) = 1 − P(a, x), as exact where it is small."""
    if x <= 0:
        return 1.0
    return 1.0 - _series(a, x) if x < a + 1 else _fraction(a, x)


def _series(a: float, x: float) -> float:
    term = total = 1.0 / a
    for n in range(1, _MOST_TERMS):
        term *= x / (a + n)
        total += term
        if term < total * _CLOSE:
            break
    return total * math.exp(a * math.log(x) - x - math.lgamma(a))


def _fraction(a: float, x: float) -> float:
    """Lentz's way through the continued fraction."""
    tiny = 1e-300
    b = x + 1 - a
    c, d = 1 / tiny, 1 / b
    found = d
    for n in range(1, _MOST_TERMS):
        factor = -n * (n - a)
        b += 2
        d = 1 / (factor * d + b or tiny)
        c = b + factor / c or tiny
        found *= c * d
        if abs(c * d - 1) < _CLOSE:
            break
    return found * math.exp(a * math.log(x) - x - math.lgamma(a))
