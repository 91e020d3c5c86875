"""Test cases of the agent's loop that no real process reaches in a test: a set clock, a full buffer, a refusal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nodes.agent import loop
from nodes.agent.loop import AgentLoop, AgentTiming
from nodes.agent.reporting import batches
from nodes.agent.reporting.buffer import batches_of
from nodes.agent.settings import AgentSettings


class Clock:
    """Both clocks of a process; only the wall clock can be set."""

    def __init__(self) -> None:
        self.now, self.ahead = 1000.0, 1_790_000_000.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now + self.ahead


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(loop, "time", found)
    return found


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Iterator[Any]:
    """Make agents that a test drives by hand, and that send nothing."""
    created: list[AgentLoop] = []

    def create(**more: Any) -> AgentLoop:
        settings = AgentSettings(
            "node01", tmp_path / "state", tmp_path / "kmsg", (), "http://127.0.0.1:9", tmp_path / "t"
        )
        created.append(AgentLoop(settings, AgentTiming(), proc_root=tmp_path / "none", sys=tmp_path / "none", **more))
        return created[-1]

    yield create
    for agent in created:
        agent._buffer.close()


def written(agent: AgentLoop) -> list[dict[str, Any]]:
    first, found = 0, []
    while first < agent._buffer.next:
        first, lines = agent._buffer.read(first, 60)
        found += batches_of(lines)
        first += len(lines)
    return found


def windows(agent: AgentLoop) -> list[tuple[int, int]]:
    return [(batch["at"], batch["n"]) for batch in written(agent) if batch["n"]]


def go(agent: AgentLoop, clock: Clock, seconds: int) -> None:
    for _ in range(seconds):
        clock.now += 1.0
        agent._note_clock()
        agent._close_windows()


def test_windows_follow_each_other(make: Any, clock: Clock) -> None:
    agent, start = make(), int(clock.time())
    go(agent, clock, 31)
    assert windows(agent) == [(start, 10), (start + 10, 10), (start + 20, 10)]


def test_a_clock_that_is_set_ends_the_window(make: Any, clock: Clock, capfd: pytest.CaptureFixture[str]) -> None:
    agent, start = make(), int(clock.time())
    go(agent, clock, 14)
    clock.ahead += 3600
    go(agent, clock, 12)
    clock.ahead -= 7200
    go(agent, clock, 13)
    report = windows(agent)
    assert report[:2] == [(start, 10), (start + 10, 5)]
    assert report[2] == (start + 15 + 3600, 10)
    assert report[-1][0] == pytest.approx(start - 3600 + 26, abs=2)
    assert "The clock was set by +3600.0 s" in capfd.readouterr().err


def test_a_slewed_clock_does_not(make: Any, clock: Clock) -> None:
    agent, start = make(), int(clock.time())
    for _ in range(31):
        clock.ahead += 0.0005
        go(agent, clock, 1)
    assert windows(agent) == [(start, 10), (start + 10, 10), (start + 20, 10)]


def test_a_suspended_process_leaves_the_time_out(make: Any, clock: Clock) -> None:
    agent, start = make(), int(clock.time())
    go(agent, clock, 5)
    clock.now += 300
    go(agent, clock, 13)
    report = windows(agent)
    assert report[0] == (start, 10)
    assert report[1][0] >= start + 300


def test_a_full_buffer_repeats_events_and_reports_what_is_missing(make: Any, clock: Clock) -> None:
    agent = make(limit_bytes=6000)
    start = int(clock.time())
    agent._events = [{"kind": "xid", "at": float(start), "xid": 79, "seq": 1, "boot_id": "b", "count": 1}]
    agent._send_urgent_events()
    clock.now += 1
    agent._send_urgent_events()
    go(agent, clock, 3000)
    report = written(agent)
    events = [event for batch in report for event in batch["events"]]
    (xid,) = [event for event in events if event["kind"] == "xid"]
    assert xid["again"] is True
    gaps = [event for event in events if event["kind"] == "agent.gap"]
    first = min(batch["at"] for batch in report if batch["n"])
    assert min(gap["from"] for gap in gaps) == start
    assert max(gap["to"] for gap in gaps) == first
    assert sum(gap["batches"] for gap in gaps) == (first - start) // 10


def refused(agent: AgentLoop, batch: dict[str, Any]) -> list[dict[str, Any]]:
    before = len(written(agent))
    agent._refused.put(json.dumps(batch).encode())
    agent._split_rejected()
    return written(agent)[before:]


def test_refused_batches_are_sent_in_parts(make: Any, capfd: pytest.CaptureFixture[str]) -> None:
    agent = make()
    events = [{"kind": "xid", "at": 5.0, "xid": 79}, {"kind": "boot", "at": 4.0}]
    gap, alone = refused(agent, {"at": 100, "period": 1, "n": 10, "events": events})
    (text,) = gap["events"]
    assert (text["kind"], text["from"], text["to"], text["batches"]) == ("agent.gap", 100, 110, 1)
    assert text["problem"] == "the portal refused them"
    assert alone["events"] == events
    assert [batch["events"] for batch in refused(agent, alone)] == [[event] for event in events]
    assert refused(agent, {"at": 100, "period": 1, "n": 0, "events": events[1:]}) == []
    assert "The portal rejects an event, which is lost: boot" in capfd.readouterr().err


def test_of_repeated_events_the_newest_is_enough() -> None:
    gap = {"kind": "agent.gap", "at": 1.0, "from": 10, "to": 20, "batches": 1}
    events = [
        {"kind": "facts", "at": 1.0},
        {"kind": "gpu.counters", "at": 1.0, "gpu": "a"},
        {"kind": "xid", "at": 1.0},
        gap,
        {"kind": "gpu.counters", "at": 2.0, "gpu": "a"},
        {"kind": "gpu.counters", "at": 2.0, "gpu": "b"},
        {"kind": "facts", "at": 3.0},
        {**gap, "from": 20, "to": 40, "batches": 2},
    ]
    report = batches.events_to_resend(events)
    assert [(event["kind"], event["at"]) for event in report] == [
        *(("facts", 3.0), ("gpu.counters", 2.0), ("gpu.counters", 2.0), ("xid", 1.0), ("agent.gap", 1.0)),
    ]
    assert (report[-1]["from"], report[-1]["to"], report[-1]["batches"]) == (10, 40, 3)
    assert all(event["again"] for event in report)
