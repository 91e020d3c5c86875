"""Test that samples are stored in frames, chunks, minutes and ten minutes, each second once."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from django.db import transaction

from nodes.models import Frame, HealthEntry, NodeEvent
from nodes.telemetry import merge, thin
from nodes.telemetry.fields import WINDOW_S, gpu_owner, host_owner
from nodes.telemetry.grid import grid
from portal.models import Chunk, Series
from portal.series import store
from tests.nodes.telemetry.curves import outline
from tests.nodes.telemetry.reporting import UUIDS, Machine

pytestmark = pytest.mark.django_db

EPOCH = datetime.fromtimestamp(0, UTC)
ALIGNED = 1_763_000_000 // thin.MINUTES.block_s * thin.MINUTES.block_s


def single_gpu() -> Machine:
    return Machine(gpus=UUIDS[:1])


def gpu_id(machine: Machine) -> int:
    return machine.agent.gpus.get(uuid=UUIDS[0]).pk


def curve(machine: Machine, start: int, end: int, *, points: int | None = None, name: str = "watts") -> Any:
    return outline(machine.agent, gpu_owner(gpu_id(machine)), name, start=start, end=end, points=points)


def fill_window(machine: Machine, start: int) -> list[int]:
    """A window of watts that differ each second; answers them."""
    batches, values = [], []
    for at in range(start, start + WINDOW_S, 10):
        n = min(10, start + WINDOW_S - at)
        row = [(at + i) % 701 for i in range(n)]
        values += row
        batches.append(machine.batch(at, n=n, watts=[row], host={"load_1": at % 17}))
    for at in range(0, len(batches), 60):
        machine.post(*batches[at : at + 60])
    return values


def test_frames_become_full_chunks_and_go() -> None:
    machine = single_gpu()
    values = fill_window(machine, ALIGNED)
    assert merge.merge(now=ALIGNED + WINDOW_S) == 0, "what comes late may still come"
    before = curve(machine, ALIGNED, ALIGNED + WINDOW_S).min.tolist()
    machine.fill(ALIGNED + WINDOW_S, ALIGNED + WINDOW_S + 70, watts=1)
    assert merge.merge(now=ALIGNED + WINDOW_S + 70) == 103
    chunk = Chunk.objects.get(series__owner_kind="gpu", series__name="watts")
    assert (chunk.kind, chunk.n, chunk.stride, chunk.first_step) == (Chunk.Kind.MERGED, WINDOW_S, 1, ALIGNED)
    assert Frame.objects.count() == 7
    assert before == curve(machine, ALIGNED, ALIGNED + WINDOW_S - 1).min.tolist() == values
    agent, end = machine.agent, ALIGNED + WINDOW_S - 1
    host = outline(agent, host_owner(agent.pk), "load_1", start=ALIGNED, end=end, points=None)
    assert host.min.tolist() == [at % 17 for at in range(ALIGNED, ALIGNED + WINDOW_S, 10)]


def test_a_machine_that_fell_silent_is_merged_too() -> None:
    machine = single_gpu()
    machine.fill(ALIGNED + 100, ALIGNED + 200, watts=7)
    assert merge.merge(now=ALIGNED + WINDOW_S + 1) == 0
    assert merge.merge(now=ALIGNED + WINDOW_S + merge.SILENT_S + 1) == 10
    assert curve(machine, ALIGNED, ALIGNED + WINDOW_S).min.tolist() == [7.0] * 100


def test_a_merge_that_was_killed_in_between_doubles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(gpus=UUIDS[:4])
    fields = dict.fromkeys(("gpu_percent", "memory_mib", "watts", "sm_mhz", "temperature_c"), 3)
    machine.fill(ALIGNED, ALIGNED + WINDOW_S + 200, **fields)
    written = []

    def insert(rows: Any) -> None:
        if written:
            raise KeyboardInterrupt
        written.append(len(rows))
        store_insert(rows)

    store_insert = store.insert
    monkeypatch.setattr(store, "insert", insert)
    monkeypatch.setattr(merge, "ROWS", 7)
    with pytest.raises(KeyboardInterrupt), transaction.atomic():
        merge.merge_window(machine.agent.pk, ALIGNED)
    monkeypatch.undo()
    assert merge.merge_window(machine.agent.pk, ALIGNED) == 102  # one reaches into the next window
    assert merge.merge_window(machine.agent.pk, ALIGNED) == 0
    rest = Frame.objects.order_by("at").first()
    assert rest is not None
    assert (rest.at, rest.until) == (ALIGNED + WINDOW_S, ALIGNED + WINDOW_S + 6)
    per_series = Chunk.objects.values_list("series").distinct().count()
    assert Chunk.objects.count() == per_series == 20


def test_what_comes_late_is_merged_after_its_window_was() -> None:
    machine, late = single_gpu(), Machine(gpus=UUIDS[:1], node="dgx-01", stream="f" * 16)
    late.token = machine.token = late.token
    machine.fill(ALIGNED, ALIGNED + 500, watts=1)
    machine.fill(ALIGNED + 600, ALIGNED + WINDOW_S + 100, watts=1)
    merge.merge(now=ALIGNED + WINDOW_S + 100)
    late.fill(ALIGNED + 500, ALIGNED + 600, watts=2)
    merge.merge(now=ALIGNED + WINDOW_S + 110)
    found = curve(machine, ALIGNED, ALIGNED + WINDOW_S - 1).min.tolist()
    assert found == [1.0] * 500 + [2.0] * 100 + [1.0] * (WINDOW_S - 600)
    assert Frame.objects.filter(at__lt=ALIGNED + WINDOW_S - 10).count() == 0


def test_a_field_that_nobody_reports_has_no_series() -> None:
    machine = single_gpu()
    machine.fill(ALIGNED, ALIGNED + WINDOW_S + 100, watts=[[None, 5, None, 5, None, 5, None, 5, None, 5]])
    merge.merge(now=ALIGNED + WINDOW_S + 100)
    assert set(Series.objects.filter(owner_kind="gpu").values_list("name", flat=True)) == {"watts"}
    assert len(curve(machine, ALIGNED, ALIGNED + WINDOW_S - 1).first) == 512


def test_what_is_long_comes_in_stretches_and_loses_no_spike() -> None:
    machine = single_gpu()
    values = fill_window(machine, ALIGNED)
    found = curve(machine, ALIGNED, ALIGNED + WINDOW_S, points=50)
    assert len(found.first) <= 50
    assert (found.min.min(), found.max.max()) == (min(values), max(values))
    assert math.isclose(found.sum.sum() / found.n.sum(), sum(values) / len(values))


def planted(machine: Machine, start: int, end: int) -> None:
    """Chunks of a value a second, as merging leaves them, without the way over HTTP."""
    from portal.series.codec import Points

    machine.post(machine.facts(start))
    for owner, name, stride in ((gpu_owner(gpu_id(machine)), "watts", 1), (host_owner(machine.agent.pk), "load_1", 10)):
        series_id = store.declare(owner, [name])[name]
        rows = []
        for at in range(start, end, WINDOW_S):
            step = np.arange(at, min(at + WINDOW_S, end), stride, dtype=np.int64)
            value = (step % 60).astype(np.float64)
            rows.append(store.merged_row(series_id, 0, 0, Points(step, np.full(len(step), float(at)), value)))
        store.insert(rows)
    agent = machine.agent
    agent.merged_to, agent.sampled_at = end, end - 1
    agent.save()


def test_what_is_two_days_old_becomes_minutes() -> None:
    machine, block = single_gpu(), thin.MINUTES.block_s
    planted(machine, ALIGNED, ALIGNED + 2 * block)
    now = ALIGNED + block + thin.MINUTES.after_s
    assert thin.thin(now=now - 1) == 0
    assert thin.thin(now=now) == 2
    assert thin.thin(now=now) == 0
    names = set(Series.objects.values_list("name", "column"))
    assert {("watts@60", ""), ("watts@60", "min"), ("watts@60", "max"), ("load_1@60", "")} <= names
    raw = Chunk.objects.filter(series__name="watts")
    assert min(raw.values_list("first_step", flat=True)) == ALIGNED + block
    old = curve(machine, ALIGNED, ALIGNED + block - 1)
    assert (len(old.first), set(old.min), set(old.max), set(old.mean())) == (1024, {0.0}, {59.0}, {29.5})
    across = curve(machine, ALIGNED + block - 60, ALIGNED + block + 59)
    assert across.n.tolist() == [60] + [1] * 60
    whole = Chunk.objects.filter(series__name="watts@60")
    assert sorted(whole.values_list("n", "stride")) == [(1024, 60)] * 3


def test_minutes_become_ten_minutes_and_then_go() -> None:
    machine, block = single_gpu(), thin.TENS.block_s
    start = ALIGNED // block * block
    planted(machine, start, start + block)
    now = start + block + thin.TENS.after_s
    assert thin.thin(now=now, budget_s=60) == 4
    found = curve(machine, start, start + block - 1)
    assert (len(found.first), set(found.min), set(found.max), set(found.mean())) == (1024, {0.0}, {59.0}, {29.5})
    assert Chunk.objects.exclude(series__name__contains="@600").count() == 0
    machine.post(machine.event("xid", start, gpu=UUIDS[0], xid=13, seq=1, text="old"))
    cleared, still_open = (HealthEntry(node="dgx-01", rule=rule, first_seen=EPOCH, last_seen=EPOCH) for rule in "ab")
    cleared.state, cleared.cleared_at = "cleared", EPOCH
    HealthEntry.objects.bulk_create([cleared, still_open])
    assert thin.forget(now=start + block + thin.RETENTION_S) == 6
    assert list(HealthEntry.objects.values_list("rule", flat=True)) == ["b"]
    assert not NodeEvent.objects.exists()
    assert not Chunk.objects.exists()


def test_minutes_fill_the_columns_that_they_last() -> None:
    machine, block = single_gpu(), thin.MINUTES.block_s
    planted(machine, ALIGNED, ALIGNED + 2 * block)
    thin.thin(now=ALIGNED + block + thin.MINUTES.after_s)
    fine = grid([gpu_id(machine)], "watts", start=ALIGNED + 600, end=ALIGNED + 1_200, columns=60)
    assert (fine.width, set(fine.mean[0])) == (10, {29.5})
    across = grid([gpu_id(machine)], "watts", start=ALIGNED + block - 600, end=ALIGNED + block + 600, columns=40)
    assert (across.width, np.isnan(across.mean).any()) == (30, False)
    coarse = grid([gpu_id(machine)], "watts", start=ALIGNED, end=ALIGNED + 2 * block, columns=16)
    assert set(coarse.mean[0].round(6)) == {29.5}
    assert set(coarse.maximum[0]) == {29.5, 59.0}


def test_a_grid_is_of_chunks_and_frames_in_whatever_order_they_came() -> None:
    machine = Machine(gpus=UUIDS[:2])
    end = ALIGNED + 2 * WINDOW_S
    machine.fill(ALIGNED, ALIGNED + 400, watts=1)
    machine.fill(ALIGNED + 600, end, watts=1)
    merge.merge(now=end)
    machine.fill(ALIGNED + 400, ALIGNED + 600, watts=4)
    merge.merge(now=end)
    assert Frame.objects.exists(), "of the second window nothing is merged yet"
    ids = sorted(gpu.pk for gpu in machine.agent.gpus.all())
    found = grid(ids, "watts", start=ALIGNED, end=end, columns=WINDOW_S // 50)
    assert (found.width, found.mean.shape) == (103, (2, 20))
    assert found.maximum.tolist() == [[1.0] * 3 + [4.0] * 3 + [1.0] * 14] * 2
    assert found.mean[0, 3:6].round(3).tolist() == [round((91 + 12 * 4) / 103, 3), 4.0, round((85 * 4 + 18) / 103, 3)]


def test_a_grid_counts_a_gpu_in_its_stretches_alone() -> None:
    machine = single_gpu()
    values = fill_window(machine, ALIGNED)
    ids, end = [gpu_id(machine)], ALIGNED + WINDOW_S
    stretches = [(700.0, math.inf), (20.5, 100.25), (90.0, 110.0), (400.0, 400.0), (950.0, 960.0), (500.0, 300.0)]
    expected = [values[i] for i in (*range(20, 110), *range(700, WINDOW_S))]

    def read_within(*stretches: tuple[float, float]) -> Any:
        moments = [(ALIGNED + since, ALIGNED + until) for since, until in stretches]
        return grid(ids, "watts", start=ALIGNED, end=end, columns=1, within={ids[0]: moments})

    for _ in range(2):  # first of frames, then of chunks
        found = read_within(*stretches)
        assert (found.mean[0, 0].round(6), found.maximum[0, 0]) == (
            round(sum(expected) / len(expected), 6),
            max(expected),
        )
        found = read_within((20.5, 100.25))
        assert (found.mean[0, 0].round(6), found.maximum[0, 0]) == (
            round(sum(expected[:80]) / 80, 6),
            max(expected[:80]),
        )
        assert np.isnan(read_within().mean).all()
        merge.merge(now=end + merge.SILENT_S + 1)
    assert not Frame.objects.exists()
