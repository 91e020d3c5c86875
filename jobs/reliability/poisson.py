"""Exact 95 % intervals and tail probabilities of Poisson counts, by the incomplete gamma function. No Django.

The interval of a mean by one count is Garwood's (1936, Biometrika 28, 437): its ends are the means for which the count,
or fewer, or more, has a probability of 2.5 %; tables express it by quantiles of χ² with 2n and 2n + 2 degrees of
freedom. It covers the true mean at least 95 % of the time, at small counts rather more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

OUTSIDE_PROBABILITY = 0.05
_CLOSE = 1e-15
_MAX_TERMS = 1_000_000


def at_least(count: int, mean: float) -> float:
    """Return the probability of `count` or more if `mean` are expected."""
    return 1.0 if count <= 0 else lower_gamma(float(count), mean)


def at_most(count: int, mean: float) -> float:
    """Return the probability of `count` or fewer if `mean` are expected."""
    return 0.0 if count < 0 else upper_gamma(count + 1.0, mean)


@lru_cache(maxsize=4096)
def interval(count: int, outside: float = OUTSIDE_PROBABILITY) -> tuple[float, float]:
    """Return the confidence interval of the mean; `outside` is the probability that the true mean lies outside."""
    low = 0.0 if count == 0 else _mean_where(lambda mean: at_least(count, mean) - outside / 2, count)
    return low, _mean_where(lambda mean: outside / 2 - at_most(count, mean), count + 1)


def _mean_where(rises_through_zero: Callable[[float], float], about: float) -> float:
    """Return the root of an increasing function of the mean, which lies somewhere around `about`."""
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
    """Return the regularised lower incomplete gamma function P(a, x), by its series or as the complement of Q(a, x).

    Abramowitz and Stegun 6.5.29 and 6.5.31, which converge fast on either side of x = a + 1.
    """
    if x <= 0:
        return 0.0
    return _series(a, x) if x < a + 1 else 1.0 - _fraction(a, x)


def upper_gamma(a: float, x: float) -> float:
    """Return Q(a, x) = 1 − P(a, x), accurate also where it is small."""
    if x <= 0:
        return 1.0
    return 1.0 - _series(a, x) if x < a + 1 else _fraction(a, x)


def _series(a: float, x: float) -> float:
    term = total = 1.0 / a
    for n in range(1, _MAX_TERMS):
        term *= x / (a + n)
        total += term
        if term < total * _CLOSE:
            break
    return total * math.exp(a * math.log(x) - x - math.lgamma(a))


def _fraction(a: float, x: float) -> float:
    """Evaluate the continued fraction with Lentz's method."""
    tiny = 1e-300
    b = x + 1 - a
    c, d = 1 / tiny, 1 / b
    fraction = d
    for n in range(1, _MAX_TERMS):
        factor = -n * (n - a)
        b += 2
        d = 1 / (factor * d + b or tiny)
        c = b + factor / c or tiny
        fraction *= c * d
        if abs(c * d - 1) < _CLOSE:
            break
    return fraction * math.exp(a * math.log(x) - x - math.lgamma(a))
