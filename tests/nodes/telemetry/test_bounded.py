"""Test that a telemetry post takes a bounded number of queries, and has the same result however it is split."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nodes.models import Agent, Frame, Gpu, GpuPlace, NodeEvent
from nodes.telemetry import events, intake, machines, thin, warn, wire
from tests.examples import examples
from tests.nodes.telemetry.reporting import START, UUIDS, Machine

pytestmark = pytest.mark.django_db
NOW = float(START)


def letters(i: int) -> str:
    return "".join(chr(97 + int(digit)) for digit in str(i))


EVENTS: dict[str, Any] = {
    "facts": lambda i: {"kind": "facts", "at": NOW, "gpus": [_gpu(i, slot) for slot in range(8)]},
    "gpu.counters": lambda i: {"kind": "gpu.counters", "at": NOW, "gpu": UUIDS[i % 8], "ecc": i},
    "xid, equal": lambda i: {"kind": "xid", "at": NOW, "xid": 63, "seq": i, "last_seq": i},
    "xid, different": lambda i: {"kind": "xid", "at": NOW, "xid": 63, "text": letters(i), "seq": i, "last_seq": i},
    "mount.slow": lambda i: {"kind": "mount.slow", "at": NOW, "mount": f"/{letters(i)}"},
    "mount.well": lambda i: {"kind": "mount.well", "at": NOW, "mount": f"/{letters(i)}"},
    "gpu.lost": lambda i: {"kind": ("gpu.lost", "gpu.back")[i % 2], "at": NOW + i, "gpu": UUIDS[i % 8]},
    "custom": lambda i: {"kind": f"site.{letters(i)}", "at": NOW, "values": list(range(500))},
}


def _gpu(i: int, slot: int) -> dict[str, Any]:
    return {"uuid": f"GPU-{i % 2}-{slot}", "index": slot, "name": "NVIDIA H100"}


@pytest.mark.parametrize("kind", EVENTS)
def test_two_hundred_events_take_as_many_queries_as_two(kind: str) -> None:
    taken = []
    for count in (2, 200):
        machine = Machine(f"dgx-{count}")
        machine.gpus = UUIDS if "gpu" in kind else ()
        machine.post(machine.facts(NOW - 60))
        with CaptureQueriesContext(connection) as queries:
            answer = machine.post({"at": START, "n": 0, "events": [EVENTS[kind](i) for i in range(count)]})
        assert answer.status_code == 200
        taken.append(len(queries))
        Gpu.objects.update(gone_at="2020-01-01T00:00Z")
    assert taken[1] <= taken[0] + 4  # rows are inserted 66 a statement


def test_sixty_batches_take_as_many_queries_for_gpus_as_a_single_batch() -> None:
    taken = []
    for name, count in (("few", 1), ("many", 60)):
        machine = Machine(name, gpus=tuple(f"GPU-{name}-{i}" for i in range(64)))
        with CaptureQueriesContext(connection) as queries:
            answer = machine.post(*(machine.batch(START + 10 * i, n=1, watts=3) for i in range(count)))
        assert answer.status_code == 200
        taken.append(len(queries))
    assert taken[1] <= taken[0] + 1
    assert Gpu.objects.count() == GpuPlace.objects.count() == 128


def test_the_last_facts_of_a_post_count() -> None:
    machine = Machine()
    machine.post(*(machine.facts(NOW + i, driver=f"570.{i}") for i in range(60)))
    assert machine.agent.facts["driver"] == "570.59"
    assert Gpu.objects.filter(gone_at=None).count() == 2
    place = GpuPlace.objects.filter(until=None).first()
    assert place is not None
    assert place.since.timestamp() == NOW + 59


def test_a_post_names_no_more_gpus_than_a_machine_can_have() -> None:
    machine = Machine()
    batches = [{**machine.batch(START, n=0), "gpus": [f"GPU-{i}-{slot}" for slot in range(64)]} for i in range(3)]
    answer = machine.post(*batches)
    assert answer.status_code == 413
    assert "different GPUs" in answer.json()["detail"]
    assert machine.post(*batches[:2]).status_code == 200


def test_what_is_left_out_is_logged_once_an_hour(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(events, "MAX_PER_DAY", 10)
    monkeypatch.setattr(warn, "_last", {})
    machine = Machine()
    for _ in range(3):
        now = time.time()
        reports = [{"kind": "xid", "at": now, "text": letters(i)} for i in range(200)]
        assert machine.post({"at": int(now), "n": 0, "events": reports}).status_code == 200
        assert machine.post(*(machine.batch(at, n=1, watts=3) for at in range(1, 60, 10))).status_code == 200
    assert NodeEvent.objects.count() == 10
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        "dgx-01: more than 10 different events within a day: 190 of a post are left out",
        "dgx-01: samples of second 1 are left out: implausible time",
    ]


def test_what_there_is_no_time_for_continues_where_the_response_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch is stored once, whether one transaction or several requests store its post."""
    monkeypatch.setattr(intake, "PART_EVENTS", 2)
    machine = Machine()
    batches = [
        {**machine.batch(START + 10 * i, watts=i), "events": [{"kind": "boot", "at": NOW - 3_600 * i}]}
        for i in range(7)
    ]
    taken, posts = 0, 0
    while taken < len(batches):
        body = wire.parse(_frame(machine, batches[taken:], first=taken))
        taken = intake.take(machine.agent.pk, body, now=NOW, seconds=0)
        posts += 1
    assert posts == 4
    assert list(Frame.objects.order_by("at").values_list("at", flat=True)) == [START + 10 * i for i in range(7)]
    assert NodeEvent.objects.count() == 7


def _frame(machine: Machine, batches: list[dict[str, Any]], *, first: int) -> bytes:
    head = {"version": 1, "stream": machine.stream, "first": first, "boot_id": "b1", "sent_at": NOW, "agent": "1"}
    return json.dumps({**head, "batches": batches}).encode()


HAPPENING = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["xid", "sxid", "gpu.lost", "gpu.back", "mount.slow", "mount.well", "boot"]),
        "at": st.integers(0, 12).map(lambda minutes: NOW + 240 * minutes),
    },
    optional={
        "gpu": st.sampled_from(UUIDS[:2]),
        "mount": st.sampled_from(["/data", "/home"]),
        "text": st.sampled_from(["row 1", "row 2", "link"]),
        "xid": st.sampled_from([63, 79]),
        "seq": st.integers(0, 8),
        "last_seq": st.integers(0, 12),
        "count": st.integers(1, 5),
        "since": st.integers(0, 12).map(lambda minutes: NOW + 240 * minutes),
        "again": st.booleans(),
        "confirmed": st.booleans(),
        "boot_id": st.sampled_from(["b1", "b0"]),
    },
)


@given(st.lists(HAPPENING, min_size=1, max_size=14))
@settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_events_make_the_same_rows_in_a_single_post_as_in_many(events: list[dict[str, Any]]) -> None:
    rows = []
    for node, size in (("whole", len(events)), ("single", 1)):
        Gpu.objects.all().delete()
        Agent.objects.all().delete()
        machine = Machine(node)
        machine.post(machine.facts(NOW - 3_600))
        for at in range(0, len(events), size):
            assert machine.post({"at": START, "n": 0, "events": events[at : at + size]}).status_code == 200
        fields = ("kind", "code", "text", "at", "last_at", "is_open", "count", "is_confirmed", "boot_id", "data")
        stored = NodeEvent.objects.order_by("id").values_list(*fields, "first_seq", "last_seq", "gpu__uuid")
        rows.append((list(stored), list(Gpu.objects.order_by("uuid").values_list("lost_at")), machine.agent.kernel_seq))
    assert rows[0] == rows[1]


def test_a_machine_that_loses_its_folder_at_each_boot_is_never_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "MAX_STREAMS", 3)
    machine = Machine()
    for number in range(5):
        machine.stream, machine.next = f"{number:016x}", 0
        assert machine.post(machine.batch(START + 10 * number, watts=3)).json() == {"next": 1}
    assert sorted(machine.agent.streams.values_list("uid", flat=True)) == [f"{number:016x}" for number in (2, 3, 4)]


def test_a_driver_that_swaps_indices_fills_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "MAX_PLACES_PER_DAY", 5)
    machine, now = Machine(), int(time.time())
    for number in range(6):
        machine.gpus = (UUIDS[number % 2], UUIDS[1 - number % 2])
        assert machine.post(machine.facts(now - 60 + number)).status_code == 200
    assert GpuPlace.objects.count() == 5
    gpus = machine.agent.gpus.filter(gone_at=None).order_by("index")
    assert list(gpus.values_list("uuid", flat=True)) == [UUIDS[1], UUIDS[0]]


def test_old_places_are_deleted_but_not_the_first_of_a_gpu() -> None:
    machine = Machine(gpus=UUIDS[:1])
    for number, slots in enumerate(((0, 1), (1, 0), (0, 1), (1, 0))):
        machine.gpus = tuple(UUIDS[slot] for slot in slots)
        machine.post(machine.facts(START + number))
    assert GpuPlace.objects.count() == 8
    thin.forget(now=START + thin.RETENTION_S + 10)
    assert [place.since.timestamp() - START for place in GpuPlace.objects.order_by("pk")] == [0, 0, 3, 3]
