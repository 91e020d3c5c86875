"""The same in every round."""

from __future__ import annotations


def factor(round_: int, rounds: int) -> float:
    return 1.0
