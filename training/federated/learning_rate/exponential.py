"""Multiplied by a factor after every round, as in FedAvg's experiments (McMahan et al., 2017, arXiv 1602.05629)."""

from __future__ import annotations

from typing import Annotated


def factor(
    round_: int,
    rounds: int,
    *,
    decay: Annotated[float, "0.000001..1", "Factor of the rate after each round."] = 0.99,
) -> float:
    return float(decay ** (round_ - 1))
