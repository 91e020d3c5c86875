"""Half a cosine from the full rate to a share of it, without restarts (Loshchilov & Hutter, 2016, arXiv 1608.03983)."""

from __future__ import annotations

import math
from typing import Annotated


def factor(
    round_: int,
    rounds: int,
    *,
    over: Annotated[int | None, "1..1000000", "Rounds until the lowest rate; default: those of the run."] = None,
    last: Annotated[float, "0.000001..1", "The lowest rate relative to the full one."] = 0.01,
) -> float:
    """Return 1 in the first round, and `last` from round `over` + 1 on.

    A run that is extended stretches its cosine unless `over` is given.
    """
    passed = min(1.0, (round_ - 1) / (rounds if over is None else over))
    return last + (1 - last) * (1 + math.cos(math.pi * passed)) / 2
