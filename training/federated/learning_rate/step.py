"""Multiplied by a factor after every so many rounds."""

from __future__ import annotations

from typing import Annotated


def factor(
    round_: int,
    rounds: int,
    *,
    every: Annotated[int, "1..1000000", "Rounds between two steps down."] = 10,
    gamma: Annotated[float, "0.000001..1", "What the rate is multiplied by at each of them."] = 0.5,
) -> float:
    return float(gamma ** ((round_ - 1) // every))
