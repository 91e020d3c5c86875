"""Test bands over ranks: complete or ten seconds old, revised by late ranks, unchanged by any compaction."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from portal.models import Series
from portal.series import bands_read, compact, store
from tests.examples import examples
from tests.portal.series import LATER, OWNER, everybody, finite, nobody, ramp, small, write

pytestmark = pytest.mark.django_db


def band_now(now: float | None = 1e9, **options: Any) -> dict[int, tuple[float, float, float, int]]:
    band = bands_read.band([OWNER, LATER], "loss", now=now, **options)
    columns = zip(band.min.tolist(), band.median.tolist(), band.max.tolist(), band.worst_rank.tolist(), strict=True)
    return dict(zip(band.step.tolist(), columns, strict=True))


def test_a_band_is_shown_once_complete_or_ten_seconds_old() -> None:
    write("loss", (0, [(1, 5.0), (2, 6.0)]), (1, [(1, 3.0)]), (2, [(1, 4.0)]), time=1_000.0)
    assert band_now(1_001.0) == {1: (3.0, 4.0, 5.0, 0)}
    assert band_now(1_011.0) == {1: (3.0, 4.0, 5.0, 0), 2: (6.0, 6.0, 6.0, 0)}
    write("loss", (1, [(2, 8.0)]), (2, [(2, 7.0)]), time=1_020.0)
    assert band_now(1_020.0) == {1: (3.0, 4.0, 5.0, 0), 2: (6.0, 7.0, 8.0, 1)}


def test_a_late_rank_revises_a_stored_band() -> None:
    write("loss", ramp(0, 3000, rank=0), ramp(0, 3000, rank=1))
    compact.compact(quiet=everybody)
    assert Series.objects.filter(column="median").exists()
    assert band_now(points=None)[100] == (10.0, 10.5, 11.0, 1)
    write("loss", (2, [(100, 99.0)]), time=2_000.0)
    assert band_now(points=None)[100] == (10.0, 11.0, 99.0, 2)
    assert band_now(points=None)[101] == pytest.approx((10.1, 10.6, 11.1, 1))
    compact.compact(quiet=everybody)
    assert band_now(points=None)[100] == (10.0, 11.0, 99.0, 2)


def test_the_rank_with_nan_is_worst() -> None:
    write("loss", (0, [(1, 5.0)]), (1, [(1, math.nan)]), (2, [(1, 9.0)]))
    assert band_now() == {1: (5.0, 7.0, 9.0, 1)}
    write("loss", (0, [(2, math.nan)]), (1, [(2, math.nan)]), (2, [(2, math.nan)]))
    assert math.isnan(band_now()[2][1])


def test_a_single_rank_has_no_band() -> None:
    write("loss", ramp(0, 10))
    assert band_now() == {}


def test_the_band_of_the_newest_incarnation() -> None:
    write("loss", (0, [(1, 1.0), (2, 1.0)]), (1, [(1, 2.0), (2, 2.0)]))
    write("loss", (0, [(2, 8.0)]), (1, [(2, 9.0)]), owner=LATER)
    assert band_now() == {1: (1.0, 1.5, 2.0, 1), 2: (8.0, 8.5, 9.0, 1)}


def test_a_band_from_afar() -> None:
    write("loss", *(ramp(0, 1024 * 20, rank=rank) for rank in range(3)))
    compact.compact(quiet=everybody)
    compact.compact(quiet=everybody)  # the bands themselves
    band = bands_read.band([OWNER], "loss", points=10)
    assert len(band.step) == 10
    np.testing.assert_allclose(band.min, np.arange(10) * 204.8)
    np.testing.assert_allclose(band.max, np.arange(10) * 204.8 + 204.7 + 2)
    near = bands_read.band([OWNER], "loss", points=10, end=99)
    assert near.worst_rank.tolist() == [2] * 10


def check_bands(history: list[Any]) -> None:
    """Write (runs, compaction) one after the other, and check that bands are those of the newest points."""
    store.drop(OWNER)
    payload: dict[int, dict[int, float]] = {}
    ranks = 0
    for runs, then in history:
        write("loss", *runs)
        for rank, points in runs:
            ranks = max(ranks, rank + 1)
            for step, number in points:
                payload.setdefault(step, {})[rank] = number
        if then:
            compact.compact(quiet=nobody if then == "gather" else everybody)
    found = band_now(points=None)
    if ranks < 2:
        assert not found
        return
    assert set(found) >= {step for step in payload if len(payload[step]) > 1}
    for step, (low, _, high, worst) in found.items():
        assert (low, high) == (min(payload[step].values()), max(payload[step].values()))
        assert payload[step][worst] == high


run = st.tuples(st.integers(0, 3), st.lists(st.tuples(st.integers(0, 30), finite), min_size=1, max_size=5))


histories = st.lists(
    st.tuples(st.lists(run, min_size=1, max_size=4), st.sampled_from(["", "gather", "idle"])), max_size=10
)


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(histories)
@pytest.mark.lengthy
def test_bands_are_those_of_the_points_whenever_compacted(monkeypatch: pytest.MonkeyPatch, history: list[Any]) -> None:
    small(monkeypatch)
    check_bands(history)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.lengthy
def test_bands_of_long_histories(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Many doubled steps in rows of few and many ranks: the order of words must outlive every round of a compaction."""
    small(monkeypatch)
    chance = random.Random(seed)

    def a_run() -> tuple[int, list[tuple[int, float]]]:
        points = [(chance.randint(0, 30), float(chance.randint(0, 9))) for _ in range(chance.randint(1, 5))]
        return chance.randint(0, 3), points

    for _ in range(12):
        check_bands(
            [
                ([a_run() for _ in range(chance.randint(1, 4))], chance.choice(["", "gather", "idle"]))
                for _ in range(chance.randint(4, 12))
            ]
        )
