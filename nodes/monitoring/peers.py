"""Compare a value with those of its peers. No Django."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from statistics import median
from typing import TypeVar

T = TypeVar("T", bound=Hashable)

MIN_PEERS = 2


def ratios(values: Mapping[T, float | None], *, least: float = 0.0) -> dict[T, float]:
    """Return each value divided by the median of the *other* values; none where fewer than two others are known.

    `least` is the smallest divisor: three errors where the others have none are three times as many, not infinitely.
    """
    known = {key: float(value) for key, value in values.items() if value is not None}
    found: dict[T, float] = {}
    if len(known) <= MIN_PEERS:
        return found
    lowest = min(known.values())
    if lowest == max(known.values()):  # nearly always
        middle = max(least, lowest)
        return dict.fromkeys(known, lowest / middle) if middle > 0 else found
    for key, value in known.items():
        middle = max(least, median(other for peer, other in known.items() if peer != key))
        if middle > 0:
            found[key] = value / middle
    return found
