"""Test that a process's reports are on disk in time, whole and in order, and never block training."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import vigil_report
from tests.waiting import PATIENCE_S, until
from training.reporting.reporter import NullReporter, Reporter
from training.reporting.spool import read_spool


def _only(attempt: Path) -> Path:
    (path,) = (attempt / "spool").glob("*.jsonl")
    return path


def test_a_stream_has_a_header_batches_and_an_end(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, rank=3, incarnation=1, node="dgx01", restart_count=2)
    reporter.log(10, loss=0.5, gradient_norm=2)
    reporter.event("checkpoint.committed", step=10, name="step-10")
    reporter.close()
    header, *lines, end = [json.loads(line) for line in _only(tmp_path).read_text().splitlines()]
    assert header["stream"] in _only(tmp_path).name
    assert {key: header[key] for key in ("version", "incarnation", "rank", "node", "restart_count")} == {
        "version": 1, "incarnation": 1, "rank": 3, "node": "dgx01", "restart_count": 2,
    }  # fmt: skip
    assert [line["seq"] for line in lines] == list(range(len(lines)))
    assert end["end"] is True
    assert end["seq"] == len(lines)
    assert _only(tmp_path).name.startswith("1.3.")
    assert any(line["series"].get("loss") == [[10, 0.5]] for line in lines)


def test_the_first_point_is_written_at_once(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, rank=0, incarnation=0, flush_seconds=60)
    reporter.log(0, loss=1.0)
    until(lambda: (tmp_path / "spool").is_dir() and bool(read_spool(_only(tmp_path))[1]))
    reporter.close()


def test_values_that_json_does_not_know_travel_as_strings(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, rank=0, incarnation=0)
    reporter.log(1, a=math.nan, b=math.inf, c=-math.inf, d=1e-320, e=0.1)
    reporter.close()
    assert '"NaN"' in _only(tmp_path).read_text()
    _, (batch,), _ = read_spool(_only(tmp_path))
    assert math.isnan(batch.series["a"][0][1])
    assert [batch.series[name][0][1] for name in "bcde"] == [math.inf, -math.inf, 1e-320, 0.1]


def test_values_that_are_no_numbers_are_reported_once_and_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reporter = Reporter(tmp_path, rank=0, incarnation=0)
    for step in range(3):
        reporter.log(step, loss=1.0, text="hello", **{"a name\n": 1.0})  # type: ignore[arg-type]
    reporter.log(-1, loss=1.0)
    reporter.close()
    _, batches, _ = read_spool(_only(tmp_path))
    assert [name for batch in batches for name in batch.series] == ["loss"] * len(batches)
    assert capsys.readouterr().err.count("\n") >= 2


def test_flush_with_a_wait_returns_when_everything_is_on_disk(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, rank=0, incarnation=0, flush_seconds=60)
    for step in range(1000):
        reporter.log(step, loss=step)
        if step % 100 == 99:
            assert reporter.flush(wait=10)
            _, batches, _ = read_spool(_only(tmp_path))
            assert sum(batch.points for batch in batches) == step + 1
    reporter.close()


def test_events_follow_the_points_logged_before_them(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, rank=0, incarnation=0, flush_seconds=60)
    for step in range(20_000):
        reporter.log(step, loss=step)
    reporter.event("run.completed", step=20_000)
    reporter.close()
    _, batches, ended = read_spool(_only(tmp_path))
    assert ended
    assert batches[-1].events[0]["kind"] == "run.completed"
    assert max(batch.points for batch in batches) <= vigil_report.BATCH_POINTS
    assert [step for batch in batches for step, _ in batch.series.get("loss", [])] == list(range(20_000))


def test_segments_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vigil_report, "SEGMENT_BYTES", 2_000)
    reporter = Reporter(tmp_path, rank=0, incarnation=0)
    for step in range(50):
        reporter.log(step, loss=step, tokens_per_second=step * 1e3)
        assert reporter.flush(wait=10)
    reporter.close()
    segments = sorted((tmp_path / "spool").iterdir())
    assert len(segments) > 2
    assert all(path.stat().st_size < 2_500 for path in segments)
    _, batches, ended = read_spool(_only(tmp_path))
    assert ended
    assert [step for batch in batches for step, _ in batch.series["loss"]] == list(range(50))


def test_a_full_disk_stops_nobody_and_damages_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes fail half-way for a while; training goes on, nothing is torn, and what no longer fits is counted."""
    full, pwrite = [False], os.pwrite

    def failing(file: int, data: bytes, offset: int) -> int:
        if not full[0]:
            return pwrite(file, data, offset)
        pwrite(file, data[: len(data) // 2], offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(vigil_report.os, "pwrite", failing)
    monkeypatch.setattr(vigil_report, "PENDING_POINTS", 100)
    monkeypatch.setattr(vigil_report, "RETRY_SECONDS", 0.01)
    reporter = Reporter(tmp_path, rank=0, incarnation=0, flush_seconds=0.01)
    reporter.log(0, loss=0.0)
    assert reporter.flush(wait=10)
    full[0] = True
    began = time.perf_counter()
    for step in range(1, 1001):
        reporter.log(step, loss=step)
    assert time.perf_counter() - began < 1000 * vigil_report.RETRY_SECONDS, "each waited for the disk"
    assert not reporter.flush(wait=0.05)
    for step in range(1001, 1301):
        reporter.log(step, loss=step)
    full[0] = False
    assert reporter.flush(wait=10)
    reporter.close()
    header, batches, ended = read_spool(_only(tmp_path))
    events = [event for batch in batches for event in batch.events]
    assert {event["kind"] for event in events} == {"report.dropped"}
    stored = [step for batch in batches for step, _ in batch.series.get("loss", [])]
    assert len(stored) == len(set(stored))
    assert len(stored) + sum(event["points"] for event in events) == 1301
    assert header is not None
    assert ended


def _without_room(monkeypatch: pytest.MonkeyPatch, *, tries: float) -> None:
    """The disk takes half of any line with points, so many times."""
    left, pwrite = [tries], os.pwrite

    def failing(file: int, data: bytes, offset: int) -> int:
        if b'"loss"' not in data or left[0] <= 0:
            return pwrite(file, data, offset)
        left[0] -= 1
        pwrite(file, data[: len(data) // 2], offset)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(vigil_report.os, "pwrite", failing)
    monkeypatch.setattr(vigil_report, "RETRY_SECONDS", 0.01)


def test_a_disk_that_is_full_at_the_end_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _without_room(monkeypatch, tries=5)
    reporter = Reporter(tmp_path, rank=0, incarnation=0)
    reporter.log(1, loss=1.0)
    reporter.close()
    _, (batch,), ended = read_spool(_only(tmp_path))
    assert batch.series == {"loss": [(1, 1.0)]}
    assert ended


def test_a_line_that_is_lost_at_the_end_damages_none_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _without_room(monkeypatch, tries=math.inf)
    monkeypatch.setattr(vigil_report, "CLOSE_SECONDS", 0.1)
    reporter = Reporter(tmp_path, rank=0, incarnation=0)
    with reporter._lock:  # so that all of it is written at the close
        reporter._points["loss"] = [(1, 1.0)]
        reporter._events += [{"kind": "old", "time": 0.0}] * 16 + [{"kind": "run.failed", "time": 0.0}]
    reporter.close()
    until(lambda: not reporter._thread.is_alive())
    _, batches, ended = read_spool(_only(tmp_path))
    assert [event["kind"] for batch in batches for event in batch.events] == ["run.failed"]
    assert ended


def test_a_disk_that_hangs_delays_the_end_by_a_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vigil_report, "CLOSE_SECONDS", 0.2)
    released, pwrite = [False], os.pwrite

    def hanging(file: int, data: bytes, offset: int) -> int:
        while not released[0]:
            time.sleep(0.01)
        return pwrite(file, data, offset)

    monkeypatch.setattr(vigil_report.os, "pwrite", hanging)
    reporter = Reporter(tmp_path, rank=0, incarnation=0)
    reporter.log(0, loss=1.0)
    began = time.monotonic()
    reporter.close()
    assert time.monotonic() - began < PATIENCE_S / 2
    released[0] = True
    reporter._thread.join(10)


def test_an_event_that_is_too_long_keeps_its_beginning(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, rank=0, incarnation=0)
    reporter.event("run.failed", error="x" * 200_000, step=3)
    reporter.event("odd", thing=object(), number=math.nan)
    reporter.close()
    _, batches, _ = read_spool(_only(tmp_path))
    events = {event["kind"]: event for batch in batches for event in batch.events}
    assert events["run.failed"]["step"] == 3
    assert events["run.failed"]["error"] == "x" * 1024
    assert "odd" in events


def test_an_event_is_reported_as_it_was(tmp_path: Path) -> None:
    """A program goes on with its own lists and dicts, and may make of them what no JSON can hold."""
    reporter = Reporter(tmp_path, rank=0, incarnation=0)
    history = {"loss": [1.0]}
    with reporter._lock:  # nothing is written meanwhile
        reporter.event("epoch", history=history)
        history["loss"].append(math.nan)
    reporter.log(1, loss=1.0)
    assert reporter.flush(wait=10)
    reporter.close()
    _, batches, _ = read_spool(_only(tmp_path))
    (event,) = [event for batch in batches for event in batch.events]
    assert event["history"] == {"loss": [1.0]}


def test_no_odd_value_costs_the_points_next_to_it(tmp_path: Path) -> None:
    """A reader ignores a malformed line completely."""
    reporter = Reporter(tmp_path, rank=0, incarnation=0)
    deep: list[Any] = []
    for _ in range(70):
        deep = [deep]
    with reporter._lock:  # so that all of it is written at once
        reporter.log(time.time_ns(), loss=2.0)
        reporter.event("two\nlines")
        reporter.event("")
        reporter.event("x" * 100)
        reporter.event(7)  # type: ignore[arg-type]
        reporter.event("evaluated", time="12:30", accuracy=0.5)
        reporter.event("deep", thing=deep)
        reporter.log(1, loss=1.0)
    reporter.close()
    _, batches, _ = read_spool(_only(tmp_path))
    events = [event for batch in batches for event in batch.events]
    assert [event["kind"] for event in events] == ["two lines", "event", "x" * 64, "7", "evaluated", "deep"]
    assert events[4]["accuracy"] == 0.5
    assert [batch.series for batch in batches] == [{"loss": [(1, 1.0)]}]


class _Odd:
    """An object that cannot describe itself."""

    def __repr__(self) -> str:
        raise AttributeError("nothing to say")

    def __float__(self) -> float:
        raise AttributeError("no number either")


def test_no_object_gets_into_training_s_way(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, rank=0, incarnation=0)
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    reporter.event("odd", thing=_Odd())
    reporter.event("deep", thing=deep)
    reporter.log(1, odd=_Odd())  # type: ignore[arg-type]
    reporter.log(10**5000, loss=1.0)
    reporter.log(2, loss=1.0)
    reporter.close()
    _, batches, ended = read_spool(_only(tmp_path))
    assert [event["kind"] for batch in batches for event in batch.events] == ["odd", "deep"]
    assert [batch.series for batch in batches if batch.series] == [{"loss": [(2, 1.0)]}]
    assert ended


def test_a_signal_s_handler_may_report(tmp_path: Path) -> None:
    """It runs wherever its thread just is, as within a call of ours that waits for a GPU."""
    source = """
import signal, sys
import vigil_report
stream = vigil_report.Stream(sys.argv[1], rank=0, incarnation=0)
class Late:
    def __float__(self):
        signal.raise_signal(signal.SIGUSR1)
        return 1.0
def save(number, frame):
    stream.log(1, saved=1.0)
    stream.event("saving")
    assert stream.flush(wait=10)
signal.signal(signal.SIGUSR1, save)
stream.log(1, loss=Late())
stream.close()
"""
    subprocess.run([sys.executable, "-c", source, str(tmp_path)], timeout=60, check=True)
    _, batches, ended = read_spool(_only(tmp_path))
    assert {name for batch in batches for name in batch.series} == {"loss", "saved"}
    assert ended


def test_a_forked_child_leaves_the_stream_alone(tmp_path: Path) -> None:
    reporter = Reporter(tmp_path, rank=0, incarnation=0)
    reporter.log(0, loss=1.0)
    assert reporter.flush(wait=10)
    assert reporter.is_owner
    reporter._pid += 1  # as a child would see it
    assert not reporter.is_owner
    reporter.close()
    assert not read_spool(_only(tmp_path))[2]
    reporter._pid -= 1
    reporter.close()
    assert read_spool(_only(tmp_path))[2]


def test_the_null_reporter_does_nothing() -> None:
    reporter = NullReporter()
    reporter.log(0, loss=1.0)
    reporter.event("x")
    assert reporter.flush(wait=1)
    reporter.close()


def test_logging_costs_little(tmp_path: Path) -> None:
    """Five series a step, CPU of all threads counted, far below the 500 µs that our whole loop may cost."""
    reporter = Reporter(tmp_path, rank=0, incarnation=0)
    began = time.process_time()
    for step in range(5_000):
        reporter.log(step, loss=1.0, step_seconds=0.1, gradient_norm=0.2, memory_gib=1.0, tokens_per_second=1e6)
    reporter.close()
    assert (time.process_time() - began) / 5_000 < 100e-6
