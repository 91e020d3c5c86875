"""Test series: points come back exactly, before and after any compaction; a coarse query returns their outline."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from portal.models import Chunk, Series
from portal.series import codec, compact, read, store
from portal.series.codec import Points
from portal.series.store import Owner
from tests.examples import examples
from tests.portal.series import LATER, OWNER, everybody, nobody, ramp, small, write

pytestmark = pytest.mark.django_db
value = st.floats() | st.sampled_from([math.nan, math.inf, -math.inf, 0.0, -0.0, 1e308, -1e308])


def points_of(curve: read.Curve) -> dict[int, float]:
    assert curve.value is not None
    assert np.all(np.diff(curve.step) > 0), "each step once, rising"
    return dict(zip(curve.step.tolist(), curve.value.tolist(), strict=True))


def same(a: dict[int, float], b: dict[int, float]) -> bool:
    return a.keys() == b.keys() and all(x == b[k] or (math.isnan(x) and math.isnan(b[k])) for k, x in a.items())


@given(
    st.lists(st.tuples(st.integers(0, 2**53 - 1), st.floats(0, 2e9), value), min_size=1, max_size=50),
    st.integers(-3, 5),
)
def test_the_bytes_of_a_chunk_come_back(points: list[tuple[int, float, float]], rank: int) -> None:
    step, time, values = (np.array(column) for column in zip(*points, strict=True))
    runs = [(rank, float(t), 1) for t in time]
    back = codec.decode_rank(codec.encode_loose(runs, step, values), rank)
    for item, other in ((back.step, step), (back.time, time), (back.value, values)):
        np.testing.assert_array_equal(item, other)
    order = np.unique(step, return_index=True)[1]
    expected = Points(step[order], time[order], values[order])
    merged = codec.decode_merged(codec.encode_merged(expected))
    for name in ("step", "time", "value"):
        np.testing.assert_array_equal(getattr(merged, name), getattr(expected, name))


@given(st.lists(st.lists(st.lists(st.tuples(st.integers(0, 2**53 - 1), value), min_size=1, max_size=9), max_size=4)))
def test_chunks_are_joined_as_each_is_opened_alone(series: list[list[list[tuple[int, float]]]]) -> None:
    chunks = []
    for item in series:
        parts = [tuple(np.array(column) for column in zip(*sorted(points), strict=True)) for points in item]
        chunks.append([codec.encode_merged(Points(step, np.zeros(len(step)), report)) for step, report in parts])
    numbers = []
    for number, step, report in codec.concatenated(enumerate(chunks)):
        numbers.append(number)
        alone = [codec.decode_merged(data) for data in chunks[number]]
        np.testing.assert_array_equal(step, [s for part in alone for s in part.step.tolist()])
        np.testing.assert_array_equal(report, [v for part in alone for v in part.value.tolist()])
    assert numbers == list(range(len(series)))


@given(
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(1, 40), st.sampled_from([1, 1, 3, 0])), max_size=4),
    st.integers(1, 12),
)
def test_the_last_of_each_interval_is_found_without_decoding_the_others(
    shapes: list[tuple[int, int, int]], interval: int
) -> None:
    chunks, expected = [], []
    for first, number, stride in shapes:
        step = first + (stride * np.arange(number) if stride else np.cumsum(np.arange(number) % 4 + 1))
        value = np.sin(step)
        chunks.append(codec.encode_merged(Points(step, np.zeros(number), value)))
        newest = dict(zip((step // interval).tolist(), zip(step.tolist(), value.tolist(), strict=True), strict=True))
        expected += list(newest.values())
    found_steps, found_values = codec.last_of_each(chunks, interval)
    assert list(zip(found_steps.tolist(), found_values.tolist(), strict=True)) == expected


def test_evenly_spaced_steps_cost_nothing_and_smooth_values_little() -> None:
    rng = np.random.default_rng(0)
    values = np.float64(np.float32(2 + rng.normal(0, 0.1, 1024)))
    points = Points(np.arange(0, 10240, 10), np.repeat(np.arange(64.0), 16), values)
    assert len(codec.encode_merged(points)) < 1024 * 6


writes = st.lists(
    st.tuples(
        st.sampled_from([OWNER, LATER]),
        st.integers(0, 1),  # incarnation
        st.lists(
            st.tuples(st.integers(-1, 2), st.lists(st.tuples(st.integers(0, 40), value), min_size=1, max_size=6)),
            min_size=1,
            max_size=4,
        ),
        st.sampled_from(["", "", "gather", "idle"]),
    ),
    max_size=12,
)


@settings(max_examples=examples(30), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(writes)
@pytest.mark.lengthy
def test_the_line_of_record_is_the_newest_word_on_each_step(
    monkeypatch: pytest.MonkeyPatch, history: list[Any]
) -> None:
    """Against a dictionary: any order of writes, doubled steps, incarnations, attempts, compactions at any moment."""
    small(monkeypatch)
    for owner in (OWNER, LATER):
        store.drop(owner)
    payload: dict[tuple[int, Owner, int], dict[int, float]] = {}
    for owner, incarnation, runs, then in history:
        write("loss", *runs, owner=owner, incarnation=incarnation)
        for rank, points in runs:
            payload.setdefault((rank, owner, incarnation), {}).update(points)
        if then:
            compact.compact(quiet=nobody if then == "gather" else everybody)
    for rank in range(-1, 3):
        expected: dict[int, float] = {}
        for source in [(owner, i) for owner in (OWNER, LATER) for i in (0, 1)]:
            expected |= payload.get((rank, *source), {})
        curve = read.curve([OWNER, LATER], "loss", rank=rank, points=None)
        assert same(points_of(curve), expected)
        few = read.curve([OWNER, LATER], "loss", rank=rank, points=2)
        assert (few.count, few.last_step) == (len(expected), max(expected, default=None))
        for step, source in zip(curve.step.tolist(), curve.source.tolist(), strict=True):
            assert step in payload[rank, *curve.sources[source]]
        for life in read.incarnation_curves([OWNER, LATER], "loss", rank=rank, points=None):
            if len(life.step):
                assert same(points_of(life), payload[rank, *life.sources[life.source[0]]])


def test_a_range_of_steps() -> None:
    write("loss", ramp(0, 5000))
    compact.compact(quiet=everybody)
    assert list(points_of(read.curve([OWNER], "loss", start=1500, end=1503))) == [1500, 1501, 1502, 1503]
    assert len(read.curve([OWNER], "loss", start=9999).step) == 0


def test_what_is_not_there_is_empty() -> None:
    assert len(read.curve([], "loss").step) == 0
    assert len(read.curve([OWNER], "loss").step) == 0
    write("loss", ramp(0, 5))
    assert len(read.curve([OWNER], "loss", rank=7).step) == 0
    assert store.names([OWNER]) == ["loss"]
    store.drop(OWNER)
    assert not Series.objects.exists()
    assert not Chunk.objects.exists()


def test_repeated_steps_are_reported_and_nothing_else() -> None:
    write("loss", ramp(0, 100))
    write("loss", ramp(80, 120), incarnation=1)
    write("loss", ramp(120, 150), owner=LATER)  # it went on: nothing was done again
    write("loss", ramp(10, 20), owner=LATER, incarnation=1)
    owners = [OWNER, LATER]
    assert read.curve(owners, "loss").superseded == [(10, 19), (80, 99)]
    assert read.curve(owners, "loss", start=15, end=90).superseded == [(15, 19), (80, 90)]
    assert read.curve(owners, "loss", start=20, end=79).superseded == []
    assert read.curve([LATER], "loss", start=120).superseded == []
    before = read.curve(owners, "loss", points=10).superseded
    compact.compact(quiet=everybody)
    assert read.curve(owners, "loss", points=10).superseded == before == [(10, 19), (80, 99)]


def blocks_opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    opened: list[int] = []
    real = codec.decode_merged

    def counted(data: bytes, *, times: bool = True) -> Points:
        opened.append(1)
        return real(data, times=times)

    monkeypatch.setattr("portal.series.rows.decode_merged", counted)
    return opened


def test_from_afar_no_chunk_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    n = 1024 * 40
    write("loss", ramp(0, n))
    compact.compact(quiet=everybody)
    assert Chunk.objects.filter(kind=Chunk.Kind.MERGED).count() == 40
    opened = blocks_opened(monkeypatch)
    curve = read.curve([OWNER], "loss", points=20)
    assert not opened
    assert len(curve.step) == 20
    assert curve.min is not None
    assert curve.max is not None
    assert curve.mean is not None
    np.testing.assert_allclose(curve.min, np.arange(20) * 204.8)
    np.testing.assert_allclose(curve.max, np.arange(20) * 204.8 + 204.7)
    np.testing.assert_allclose(curve.mean, (curve.min + curve.max) / 2)


def test_from_afar_a_restarted_job_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first attempt's steps are all superseded, as the rows show without opening 40 chunks."""
    n = 1024 * 40
    write("loss", (0, [(step, 1e6) for step in range(n)]))
    write("loss", ramp(0, n), owner=LATER)
    compact.compact(quiet=everybody)
    opened = blocks_opened(monkeypatch)
    curve = read.curve([OWNER, LATER], "loss", points=20)
    assert not opened
    assert curve.max is not None
    assert curve.max.max() < 1e6


def test_from_afar_an_overlap_is_exact() -> None:
    """An attempt that resumed in the middle of a chunk, with the newest points still loose."""
    write("loss", (0, [(step, 7.0) for step in range(1024 * 30)]))
    compact.compact(quiet=everybody)
    write("loss", (0, [(step, 1.0) for step in range(20_000, 20_500)]), owner=LATER)
    curve = read.curve([OWNER, LATER], "loss", points=30)
    assert curve.mean is not None
    whole = points_of(read.curve([OWNER, LATER], "loss", points=None))
    assert sum(v == 1.0 for v in whole.values()) == 500
    assert curve.min is not None
    assert curve.step[np.flatnonzero(curve.min == 1.0)[0]] <= 20_000
    assert set(curve.max.tolist() if curve.max is not None else []) <= {7.0, 1.0}
    assert curve.breaks


def test_values_that_are_not_finite_are_stored_and_reported_as_gaps() -> None:
    write("loss", (0, [(0, 1.0), (1, math.nan), (2, math.nan), (3, math.inf), (5, 2.0), (6, -math.inf)]))
    curve = read.curve([OWNER], "loss")
    assert curve.gaps == [(1, 3, "NaN"), (6, 6, "-Infinity")]
    chunk = Chunk.objects.get()
    assert (chunk.min, chunk.max, chunk.sum, chunk.odd) == (1.0, 2.0, 3.0, 4)
    afar = read.curve([OWNER], "loss", points=2)
    assert afar.min is not None
    assert afar.min.tolist() == [1.0, 2.0]


def chunks_of(kind: int) -> Iterator[Chunk]:
    return Chunk.objects.filter(kind=kind, series__column="").iterator()


def test_compaction_makes_full_chunks_and_gathers_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "_REST_S", 0)
    for start in range(0, 2500, 10):
        write("loss", ramp(start, start + 10), ramp(start, start + 10, rank=1))
    assert compact.compact(quiet=nobody) == 250
    assert [(c.rank, c.n) for c in chunks_of(Chunk.Kind.MERGED)] == [(0, 1024), (0, 1024), (1, 1024), (1, 1024)]
    (left,) = chunks_of(Chunk.Kind.GATHERED)
    assert (left.n, left.rank, left.rank_last) == (2 * (2500 - 2048), 0, 1)
    assert compact.compact(quiet=nobody) == 0, "nothing more to gain"
    compact.compact(quiet=everybody)
    assert not list(chunks_of(Chunk.Kind.GATHERED))
    assert len(read.curve([OWNER], "loss", rank=1, points=None).step) == 2500


def test_no_transaction_is_large_whatever_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred ranks in one row, a thousand rows of one rank: both in small steps, to the same end."""
    monkeypatch.setattr(compact, "_REST_S", 0)
    sizes: list[int] = []
    real = compact._write

    def noted(swap: Any) -> int:
        sizes.append(len(swap.rows))
        return real(swap)

    monkeypatch.setattr(compact, "_write", noted)
    for start in range(0, 2100, 300):
        write("loss", *(ramp(start, start + 300, rank=rank) for rank in range(100)))
    for start in range(0, 300_000, 1000):
        write("other", ramp(start, start + 1000))
    compact.compact(quiet=nobody)
    assert max(sizes) <= 2 * compact.RANKS + compact.SWAPPED // codec.POINTS
    for name, rank, count in (("loss", 0, 2100), ("loss", 99, 2100), ("other", 0, 300_000)):
        assert len(read.curve([OWNER], name, rank=rank, points=None).step) == count
    merged = Chunk.objects.filter(kind=Chunk.Kind.MERGED, series__column="")
    assert merged.filter(series__name="loss").count() == 200
    assert merged.filter(series__name="other").count() == 300_000 // 1024


def test_a_compaction_overtaken_by_another_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    write("loss", ramp(0, 3000))
    real = compact._write

    def overtaken(swap: Any) -> int:
        Chunk.objects.filter(id__in=swap.ids).delete()
        return real(swap)

    monkeypatch.setattr(compact, "_write", overtaken)
    assert compact.compact(quiet=everybody) == 0
    assert not Chunk.objects.exists()
