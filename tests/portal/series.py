"""Write series in the short form that tests use: loose chunks."""

from __future__ import annotations

from collections.abc import Set

import numpy as np
import pytest
from hypothesis import strategies as st

from portal.series import compact, store
from portal.series.store import NewPoints, Owner

OWNER: Owner = ("attempt", 1)
LATER: Owner = ("attempt", 2)
finite = st.floats(allow_nan=False, allow_infinity=False)


def everybody(owners: Set[Owner]) -> Set[Owner]:
    return owners


def nobody(owners: Set[Owner]) -> Set[Owner]:
    return set()


def write(
    name: str = "loss",
    *runs: tuple[int, list[tuple[int, float]]],
    owner: Owner = OWNER,
    incarnation: int = 0,
    time: float = 1_000.0,
) -> None:
    """Write one loose chunk of (rank, [(step, value), …]) runs."""
    step = np.array([s for _, points in runs for s, _ in points], np.int64)
    values = np.array([v for _, points in runs for _, v in points], np.float64)
    ids = store.declare(owner, [name])
    store.append(ids, [NewPoints(name, incarnation, [(rank, time, len(p)) for rank, p in runs], step, values)])


def ramp(start: int, stop: int, stride: int = 1, rank: int = 0) -> tuple[int, list[tuple[int, float]]]:
    return rank, [(step, step / 10 + rank) for step in range(start, stop, stride)]


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set all bounds so low that a few points reach them."""
    for name, bound in {"ROWS": 2, "POINTS": 4, "RANKS": 2, "SWAPPED": 6, "_REST_S": 0}.items():
        monkeypatch.setattr(compact, name, bound)
