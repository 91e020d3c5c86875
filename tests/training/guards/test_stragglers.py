"""Test which rank keeps the others waiting, from each rank's own time alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from training.guards.stragglers import WINDOWS, Stragglers
from training.runtime.distributed import World
from training.step.own_time import PARTS, StepMeans

Table = list[StepMeans]


def _judge(tables: list[Table]) -> list[tuple[int, int, str]]:
    """Return (window, rank, part) of every straggler that is reported."""
    stragglers = Stragglers(World(0, len(tables[0]), torch.device("cpu")))
    return [
        (window, found.rank, found.part) for window, table in enumerate(tables, 1) for found in stragglers.judge(table)
    ]


def _table(ranks: int, *, data: float = 0.001, compute: float = 0.1, host: float = 0.004, step: float = 0.13) -> Table:
    return [StepMeans(data, compute, host, step) for _ in range(ranks)]


def _slow(table: Table, rank: int, part: str, seconds: float) -> Table:
    """Make one rank slow, for which all others wait."""
    longer = [replace(spent, step=spent.step + seconds) for spent in table]
    longer[rank] = replace(longer[rank], **{part: getattr(table[rank], part) + seconds})
    return longer


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("ranks", [2, 8])
def test_a_slow_rank_is_reported_once_after_three_windows(ranks: int, part: str) -> None:
    tables = [_slow(_table(ranks), 1, part, 0.2) for _ in range(8)]
    assert _judge(tables) == [(WINDOWS, 1, part)]


def test_a_rank_that_was_slow_by_chance_is_not() -> None:
    tables = [_slow(_table(4), window % 4, "compute", 0.2) for window in range(12)]
    assert _judge(tables) == []


def test_a_rank_that_is_slow_again_is_reported_again() -> None:
    slow = [_slow(_table(4), 2, "data", 0.3) for _ in range(3)]
    assert _judge([*slow, _table(4), *slow]) == [(3, 2, "data"), (7, 2, "data")]


def test_the_slowest_rank_is_named_until_it_is_as_fast_as_the_others() -> None:
    stragglers = Stragglers(World(0, 4, torch.device("cpu")))
    slow, two = _slow(_table(4), 2, "data", 0.3), _slow(_slow(_table(4), 2, "data", 0.3), 1, "compute", 0.2)
    named = []
    for table in [slow, slow, slow, two, two, two, _table(4)]:
        stragglers.judge(table)
        named.append(stragglers.slowest.rank if stragglers.slowest else None)
    assert named == [None, None, 2, 2, 2, 2, None]


def test_small_times_may_vary() -> None:
    """Five times as long, but by two milliseconds; or by a part of the step that is worth nothing."""
    few = [_slow(_table(4, compute=0.0002, host=0.0001, step=0.01), 1, "host", 0.002) for _ in range(9)]
    assert _judge(few) == []
    little = [_slow(_table(4, compute=0.01, step=1.0), 1, "host", 0.05) for _ in range(9)]
    assert _judge(little) == []


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_straggler(seed: int) -> None:
    numbers = random.Random(seed)
    tables = [
        [StepMeans(0.001, 0.1 * numbers.uniform(0.8, 1.4), 0.004 * numbers.uniform(0.5, 3), 0.15) for _ in range(64)]
        for _ in range(200)
    ]
    assert _judge(tables) == []


def test_two_of_eight_are_both_reported() -> None:
    tables = [_slow(_slow(_table(8), 1, "compute", 0.2), 6, "data", 0.2) for _ in range(3)]
    assert _judge(tables) == [(3, 1, "compute"), (3, 6, "data")]
