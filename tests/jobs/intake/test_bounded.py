"""Test that a report post takes a bounded number of queries, and of events per transaction."""

from __future__ import annotations

import json
import sqlite3
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from jobs.intake import parts, reports, rounds
from jobs.models import Attempt, Checkpoint, Client, Event, Incident, Job, PendingRoundEvent, Round
from portal.models import Series
from tests.jobs.reporting import Batch, Spooled, attempt_of, frame, job_of, post, send, stored
from training.federation.tables import CLIENT_COLUMNS, ROUND_COLUMNS, ClientNames, RoundTable, SplitTable
from training.reporting import lines

pytestmark = pytest.mark.django_db

EVENTS: dict[str, Any] = {
    "checkpoint.committed": lambda i: {"step": 500 + i, "generation": 1},
    "checkpoint.pruned": lambda i: {"step": i, "generation": 1},
    "checkpoint.damaged": lambda i: {"step": i, "generation": 1, "reason": "a shard is missing"},
    "run.started": lambda i: {"start_step": 0, "resumed_from": f"step-{i}.g7"},
    "incarnation.ended": lambda i: {"incarnation": i, "restarting": True, "why": "exception"},
    "phase": lambda i: {"phase": "step"},
}


@pytest.fixture
def attempt() -> Attempt:
    return attempt_of(origin=Attempt.Origin.REQUEUED)


def batch_of(kind: str, count: int) -> Batch:
    return Batch(1_000.0, {}, [{"kind": kind, "time": 1_000.0, **EVENTS[kind](i)} for i in range(count)])


@pytest.mark.parametrize("kind", EVENTS)
def test_a_hundred_events_take_as_many_queries_as_two(kind: str, attempt: Attempt) -> None:
    Checkpoint.objects.bulk_create(
        Checkpoint(job=attempt.job, attempt=attempt, step=i, name=f"step-{i}", generation=1, created_at=timezone.now())
        for i in range(200)
    )
    taken = []
    for rank, count in enumerate((2, 90)):
        with CaptureQueriesContext(connection) as queries:
            reports.ingest(attempt.pk, post(Spooled(rank=rank, batches=[batch_of(kind, count)])))
        taken.append(len(queries))
    assert taken[1] <= taken[0] + 2  # the second inserts its rows by a few statements


def test_commits_do_not_search_what_was_removed(attempt: Attempt) -> None:
    """The removals of a job are thousands of events: a commit queries an index instead of them."""
    removed = {"step": 7, "generation": 1}
    reports.ingest(attempt.pk, post(Spooled(rank=1).add_event("checkpoint.pruned", **removed)))
    with CaptureQueriesContext(connection) as queries:
        reports.ingest(attempt.pk, post(Spooled().add_event("checkpoint.committed", **removed)))
    assert Checkpoint.objects.get().state == "pruned"
    reads = [query["sql"] for query in queries if query["sql"].startswith("SELECT")]
    assert not [sql for sql in reads if "JSON" in sql.upper()]


def test_more_incarnations_than_incidents_are_counted_once(attempt: Attempt) -> None:
    for rank in range(2):
        reports.ingest(attempt.pk, post(Spooled(rank=rank, batches=[batch_of("incarnation.ended", 90)])))
    assert Incident.objects.count() == 50


def test_a_batch_of_more_events_than_a_spool_may_have_is_quarantined(attempt: Attempt) -> None:
    spooled = Spooled(batches=[batch_of("phase", 101), batch_of("phase", 1)])
    assert send(attempt, frame(spooled)).json()["streams"] == {spooled.uid: 2}
    assert sorted(Event.objects.values_list("kind", flat=True)) == ["phase", "report.quarantined"]


def test_a_batch_of_more_bytes_than_a_line_of_a_spool_is_quarantined(attempt: Attempt) -> None:
    """A batch is stored in one transaction: 100 events of 64 kB would make it 6 MB."""
    events = [{"kind": "custom", "time": 1_000.0, "values": ["x" * 590] * 100} for _ in range(17)]
    spooled = Spooled(batches=[Batch(1_000.0, {}, events), Batch(1_000.0, {}, [*events, events[0]])])
    assert len(json.dumps(events)) < lines.BATCH_BYTES
    assert send(attempt, frame(spooled)).json()["streams"] == {spooled.uid: 2}
    assert Event.objects.filter(kind="custom").count() == 17
    reason = Event.objects.get(kind="report.quarantined").data["reason"]
    assert reason == "more than 1 MiB of events"
    by_disk = [
        lines.parse(json.dumps({"seq": 0, "time": 1.0, "events": some}).encode(), 0) for some in (events, events * 2)
    ]
    assert [item.events[0]["kind"] for item in by_disk if item] == ["custom", "report.damaged"]


def test_a_post_of_50_000_series_queries_a_few_names_at_once(attempt: Attempt) -> None:
    """SQLite takes 32,766 parameters a statement by default, and an attempt has room for 1,000 series."""
    if connection.vendor == "sqlite":
        connection.ensure_connection()
        connection.connection.setlimit(sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER, 32_766)
    spooled = Spooled(batches=[Batch(1_000.0, {f"s{i}": [(1, 0.5)] for i in range(50_000)}, [])])
    with CaptureQueriesContext(connection) as queries:
        assert send(attempt, frame(spooled)).status_code == 200
    assert Series.objects.count() == reports.SERIES
    assert Event.objects.get().data == {"limit": reports.SERIES, "first_left_out": f"s{reports.SERIES}"}
    assert len(queries) < 30
    other = Spooled(rank=1, batches=spooled.batches)
    assert send(attempt, frame(other)).status_code == 200
    assert len(stored(attempt)) == 2 * reports.SERIES


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 2)), min_size=1, max_size=12), st.booleans()
)
def test_parts_hold_the_whole_post_once(batches: list[tuple[int, int, int]], ends: bool) -> None:
    """Cut anywhere, cursors go on from part to part, and no point or event is in two or in none."""
    spooled = {rank: Spooled(rank=rank, ended=ends) for rank in range(4)}
    for number, (rank, events, points) in enumerate(batches):
        series = {f"s{i}": [(number, float(i))] for i in range(points)}
        results = [{"kind": "custom", "time": 1.0, "number": number, "place": i} for i in range(events)]
        spooled[rank].batches.append(Batch(1_000.0 + number, series, results))
    whole = post(*spooled.values())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "EVENTS", 4)
        cut = parts.cut(whole)
    cursors = {part.id: 0 for part in whole.streams}
    for item in cut:
        assert len(item.events) <= 4 or len({event.batch for event in item.events}) == 1
        for stream in item.streams:
            assert stream.first == cursors[stream.id]
            cursors[stream.id] += len(stream.times)
    assert cursors == {part.id: len(part.times) for part in whole.streams}
    assert {part.id for item in cut for part in item.streams if part.end} == {p.id for p in whole.streams if p.end}
    assert _events_of(cut) == _events_of([whole])
    assert _points_of(cut) == _points_of([whole])


def _events_of(posts: list[Any]) -> list[Any]:
    return sorted(
        (post.streams[event.batch[0]].id, post.streams[event.batch[0]].first + event.batch[1], event.data["place"])
        for post in posts
        for event in post.events
    )


def _points_of(posts: list[Any]) -> list[Any]:
    found = []
    for item in posts:
        for name, columns in item.series.items():
            at = 0
            for stream, batch, count in columns.runs:
                place = item.streams[stream].id, item.streams[stream].first + batch
                found += [(name, *place, int(columns.step[i]), float(columns.value[i])) for i in range(at, at + count)]
                at += count
    return sorted(found)


def test_a_part_has_few_streams_and_few_rows_of_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "STREAMS", 3)
    empty = [Spooled(rank=rank, batches=[Batch(1_000.0, {}, [])]) for rank in range(8)]
    assert [len(part.streams) for part in parts.cut(post(*empty))] == [3, 3, 2]
    monkeypatch.setattr(parts, "STREAMS", 500)
    monkeypatch.setattr(parts, "RUNS", 4)
    points = {f"s{i}": [(1, 0.5)] for i in range(4)}
    ranks = [Spooled(rank=rank, batches=[Batch(1_000.0, points, [])]) for rank in range(8)]
    assert len(parts.cut(post(*ranks))) == 1  # a row a series, however many ranks report it
    incarnations = [Spooled(incarnation=i, batches=[Batch(1_000.0, points, [])]) for i in range(8)]
    assert len(parts.cut(post(*incarnations))) == 8


def test_a_post_that_there_is_no_time_for_goes_on_where_the_answer_points(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "EVENTS", 2)
    spooled = Spooled()
    for step in range(9):
        spooled.log(step, loss=1.0 / (step + 1)).add_event("custom", number=step)
    first, posts = 0, 0
    while first < len(spooled.batches):
        first = reports.ingest(attempt.pk, post((spooled, first, len(spooled.batches))), seconds=0).streams[spooled.uid]
        posts += 1
    assert posts == 5
    assert [data["number"] for data in Event.objects.values_list("data", flat=True)] == list(range(9))
    assert stored(attempt) == {("loss", 0, 0, step): [1.0 / (step + 1)] for step in range(9)}


@pytest.fixture
def federated() -> Attempt:
    job = job_of()
    Job.objects.filter(pk=job.pk).update(kind="federated")
    job.refresh_from_db()
    return attempt_of(job)


def table(first: int) -> dict[str, str]:
    each = {name: [1, 1] for name in ROUND_COLUMNS} | {"round": [first, first + 1]}
    clients = {name: [0, 0] for name in CLIENT_COLUMNS} | {"round": [first, first + 1], "client": [3, 4]}
    return RoundTable(_columns(each, ROUND_COLUMNS), _columns(clients, CLIENT_COLUMNS)).pack()


def _columns(values: dict[str, Any], kinds: dict[str, str]) -> Any:
    return {name: np.array(column, kinds[name]) for name, column in values.items()}


def test_rounds_are_applied_in_short_transactions_and_counted_once(
    federated: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed within an event or between two leaves the rest to whoever comes next."""
    spooled = Spooled()
    for first in range(1, 9, 2):
        spooled.add_event("round.clients", step=first, **table(first))
    with monkeypatch.context() as patch:
        killed_after(patch, transactions=3)
        with pytest.raises(StopIteration):
            reports.ingest(federated.pk, post(spooled))
    assert Event.objects.count() == 4
    assert Round.objects.count() == 4
    assert PendingRoundEvent.objects.count() == 3, "the clients of the second are not counted yet"
    reports.ingest(federated.pk, post(spooled))  # sent again, as no answer came
    assert Event.objects.count() == 4
    for _ in range(2):
        apply_all()
    assert Round.objects.count() == 8
    assert list(Client.objects.order_by("number").values_list("trained", flat=True)) == [4, 4]
    assert all(isinstance(data["rounds"], int) for data in Event.objects.values_list("data", flat=True))


@pytest.mark.parametrize("kills", [0, 1, 3])
def test_many_clients_are_stored_in_short_transactions(
    kills: int, federated: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "CLIENTS_PER_TRANSACTION", 2)
    counts = np.arange(1, 6, dtype=np.uint32)
    split = SplitTable(10, ("samples",), counts[:, None], counts + 1)
    spooled = Spooled()
    packed: dict[str, Any] = {"clients.split": split.pack(), "clients.named": ClientNames(10, tuple("abcde")).pack()}
    for kind, fields in packed.items():
        spooled.add_event(kind, **fields)
    for take in [partial(reports.ingest, federated.pk, post(spooled)), apply_all, apply_all][:kills]:
        with monkeypatch.context() as patch:
            killed_after(patch, transactions=2)
            with pytest.raises(StopIteration):
                take()
    reports.ingest(federated.pk, post(spooled))
    apply_all()
    assert list(Client.objects.order_by("number").values_list("number", "samples", "evaluation_samples", "name")) == [
        (10 + i, i + 1, i + 2, name) for i, name in enumerate("abcde")
    ]
    assert not PendingRoundEvent.objects.exists()


def apply_all() -> None:
    rounds.apply_left_over(time.monotonic() + 60)


def killed_after(patch: pytest.MonkeyPatch, *, transactions: int) -> None:
    """Let the code that applies events fail after so many transactions."""
    left = iter([True] * transactions)
    patch.setattr(rounds, "_apply", lambda *about, real=rounds._apply: next(left) and real(*about))


def test_an_attempt_with_much_to_apply_takes_no_more(federated: Attempt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "MAX_PENDING", 2)
    spooled, other = Spooled(rank=0), Spooled(rank=0, uid="f" * 16)
    for first in range(1, 7, 2):
        spooled.add_event("round.clients", step=first, **table(first))
    other.add_event("round.clients", step=9, **table(9))
    assert reports.ingest(federated.pk, post(spooled), seconds=0).streams == {spooled.uid: 3}
    answer = reports.ingest(federated.pk, post(other), seconds=0)
    assert (answer.streams, answer.taken) == ({other.uid: 0}, False)
    assert reports.ingest(federated.pk, post(other)).streams == {other.uid: 1}
    assert Round.objects.count() == 8
