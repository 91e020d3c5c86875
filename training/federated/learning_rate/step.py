"""Multiplied by a factor every few rounds."""

from __future__ import annotations

from typing import Annotated


def factor(
    round_: int,
    rounds: int,
    *,
    every: Annotated[int, "1..1000000", "Rounds between two reductions."] = 10,
    gamma: Annotated[float, "0.000001..1", "Factor of the rate at each reduction."] = 0.5,
) -> float:
    return float(gamma ** ((round_ - 1) // every))
