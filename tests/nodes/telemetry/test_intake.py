"""Test that telemetry is ingested once, from its node only, and that nothing an agent sends does harm."""

from __future__ import annotations

import gzip
import json
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from nodes.models import Agent, Frame, Gpu, GpuPlace, NodeEvent
from nodes.telemetry import events, frames, wire
from nodes.telemetry.fields import GPU_FIELDS, PLACE
from portal.http.posts import Malformed
from tests.nodes.telemetry.reporting import START, UUIDS, Machine

pytestmark = pytest.mark.django_db


def sampled(machine: Machine) -> list[tuple[int, list[list[int]]]]:
    """(second, utilisation of each GPU) of the frames, as they were stored."""
    opened = [frames.decode(bytes(data)) for data in Frame.objects.order_by("id").values_list("data", flat=True)]
    return [(item.at, item.values[PLACE["gpu_percent"]].tolist()) for item in opened]


def test_a_batch_is_stored_as_it_came() -> None:
    machine = Machine()
    rows = [[1, 2, None, 4, 5, 6, 7, 8, 9, 10], [97] * 10]
    assert machine.post(machine.batch(START, gpu_percent=rows, host={"cpu_percent": 12.5})).json() == {"next": 1}
    (data,) = Frame.objects.values_list("data", flat=True)
    frame = frames.decode(bytes(data))
    rows[0][2] = wire.MISSING
    assert frame.values[PLACE["gpu_percent"]].tolist() == rows
    assert frame.values[PLACE["watts"]].tolist() == [[wire.MISSING] * 10] * 2
    assert (frame.at, frame.period, frame.host) == (START, 1, {"cpu_percent": 12.5})
    assert list(Gpu.objects.filter(pk__in=frame.gpus).order_by("pk").values_list("uuid", flat=True)) == list(UUIDS[:2])


@given(st.data())
def test_every_frame_comes_back(data: Any) -> None:
    import numpy as np
    from hypothesis.extra.numpy import arrays

    shape = (len(GPU_FIELDS), data.draw(st.integers(0, 3)), data.draw(st.integers(0, 12)))
    values = data.draw(arrays(np.int32, shape))
    frame = frames.decode(frames.encode(5, 1, range(shape[1]), {"load_1": 0.5}, values))
    assert (frame.values == values).all()
    assert (frame.at, frame.gpus, frame.host) == (5, list(range(shape[1])), {"load_1": 0.5})


def test_what_is_sent_again_is_stored_once() -> None:
    machine = Machine()
    first, second = machine.batch(START, gpu_percent=1), machine.batch(START + 10, gpu_percent=2)
    machine.post(first, second)
    assert machine.post(first, second, first=0).json() == {"next": 2}
    assert machine.post(second, first=1).json() == {"next": 2}
    assert [at for at, _ in sampled(machine)] == [START, START + 10]


@pytest.mark.parametrize("first", [1, 7, 2**53])
def test_what_does_not_follow_changes_nothing(first: int) -> None:
    machine = Machine()
    assert machine.post(machine.batch(START, gpu_percent=1), first=first).json() == {"next": 0}
    assert not Frame.objects.exists()


def test_what_an_agent_gave_up_is_passed_and_counted() -> None:
    machine = Machine()
    machine.post(machine.batch(START, gpu_percent=1))
    gap = machine.event("agent.gap", START + 300, **{"from": START + 10, "to": START + 290, "batches": 28})
    assert machine.post(gap, machine.batch(START + 300, gpu_percent=2), first=29, given_up=28).json() == {"next": 31}
    assert machine.agent.streams.get().given_up == 28
    assert NodeEvent.objects.get().data["batches"] == 28
    assert [at for at, _ in sampled(machine)] == [START, START + 300]


def test_numbers_that_the_portal_has_may_be_given_up_too() -> None:
    """The answer to a post was lost, and then the disk was full."""
    machine = Machine()
    machine.post(*(machine.batch(START + 10 * i, gpu_percent=i) for i in range(5)))
    assert machine.post(machine.batch(START + 90, gpu_percent=9), first=9, given_up=7).json() == {"next": 10}
    assert machine.agent.streams.get().given_up == 4


def test_another_folder_is_another_stream() -> None:
    machine = Machine()
    machine.post(machine.batch(START, gpu_percent=1))
    machine.stream, machine.next = "f" * 16, 0
    assert machine.post(machine.batch(START + 10, gpu_percent=2)).json() == {"next": 1}
    assert machine.agent.streams.count() == 2


@pytest.mark.parametrize("token", ["", "vga_wrong", "another's"])
def test_nobody_reports_for_another_machine(token: str) -> None:
    machine, other = Machine(), Machine("dgx-02")
    sent = {"version": 1, "stream": "a" * 16, "first": 0, "boot_id": "", "sent_at": time.time(), "batches": []}
    answer = machine.send(json.dumps(sent).encode(), token=other.token if token == "another's" else token)
    assert answer.status_code == 401
    assert "vigil agent enroll dgx-01" in answer.json()["detail"]
    assert machine.send(json.dumps(sent).encode(), node="nowhere").status_code == 401


def test_a_clock_that_is_an_hour_off_does_not_count() -> None:
    machine, now = Machine(), int(time.time())
    wrong = now + 3600
    machine.post(
        {**machine.batch(wrong - 10, gpu_percent=5), "events": [{"kind": "mount.slow", "at": wrong, "mount": "/data"}]},
        machine.event("mount.slow", wrong, mount="/home", since=wrong - 30),
        machine.event("xid", wrong - 60, xid=13, text="x", count=2, last_at=wrong - 20),
        sent_at=wrong,
    )
    assert abs(Frame.objects.get().at - (now - 10)) <= 5
    xid, home, data = NodeEvent.objects.order_by("at")
    reports = (data.at, home.at, xid.at, xid.last_at)
    assert [round((now - at.timestamp()) / 10) for at in reports] == [0, 3, 6, 2]
    assert abs((machine.agent.clock_offset_s or 0) - 3600) <= 5


def test_a_clock_that_is_a_little_off_counts() -> None:
    machine, now = Machine(), int(time.time())
    machine.post(machine.batch(now - 40, gpu_percent=5), sent_at=now - 30)
    assert Frame.objects.get().at == now - 40


@pytest.mark.parametrize("offset", [-45, 45])
def test_events_are_stored_by_the_portals_clock_however_little_the_agents_is_off(offset: int) -> None:
    machine, now = Machine(), time.time()
    machine.post(machine.event("xid", now + offset - 10, xid=13, text="x"), sent_at=now + offset)
    assert abs(NodeEvent.objects.get().at.timestamp() - (now - 10)) <= 5


def test_a_gpu_that_was_swapped_ends_the_previous_gpu() -> None:
    machine = Machine()
    machine.post(machine.facts(START), machine.batch(START, gpu_percent=1))
    machine.gpus = (UUIDS[0], UUIDS[5])
    machine.post(machine.facts(START + 100), machine.batch(START + 100, gpu_percent=2))
    old, new = (Gpu.objects.get(uuid=uuid) for uuid in (UUIDS[1], UUIDS[5]))
    assert old.gone_at is not None
    assert old.gone_at.timestamp() == START + 100
    assert (new.index, new.gone_at) == (1, None)
    assert GpuPlace.objects.get(gpu=old).until == old.gone_at


def silent(machine: Machine) -> None:
    """Make the agent silent for a minute."""
    Agent.objects.filter(node=machine.node).update(heard_at=timezone.now() - timedelta(minutes=1))


def test_nobody_takes_a_gpu_from_a_machine_that_reports_it() -> None:
    """Whoever has stolen the token of one node could otherwise report lies about all others."""
    here, thief = Machine(), Machine("dgx-02", gpus=(UUIDS[1], UUIDS[4]))
    here.post(here.facts(START), here.batch(START, watts=300))
    thief.post(thief.facts(START), thief.batch(START + 10, watts=[[7] * 10, [8] * 10]))
    thief.post(thief.event("xid", START, gpu=UUIDS[1], xid=79, seq=1, text="a lie"))
    thief.post(thief.event("gpu.lost", START, gpu=UUIDS[1]), thief.event("gpu.counters", START, gpu=UUIDS[1], ecc=9))
    gpu = Gpu.objects.get(uuid=UUIDS[1])
    assert (gpu.agent.node, gpu.counters, gpu.lost_at) == ("dgx-01", {}, None)
    assert not gpu.events.exists()
    last = Frame.objects.order_by("id").last()
    assert last is not None
    frame = frames.decode(bytes(last.data))
    assert (len(frame.gpus), frame.values[PLACE["watts"]].tolist()) == (1, [[8] * 10])


@pytest.mark.parametrize("at", [0, 5, 10**9 - 1, 32_000_000_000])
def test_samples_of_another_age_are_left_out_and_passed(at: int) -> None:
    machine = Machine()
    assert machine.post(machine.batch(at, gpu_percent=1), machine.batch(START, gpu_percent=2)).json() == {"next": 2}
    assert Frame.objects.get().at == START
    assert machine.agent.sampled_at == START + 9


def test_a_machine_that_reports_ever_different_events_fills_no_database(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_PER_DAY", 10)
    machine, now = Machine(), time.time()
    for letter in "abcdefghijklmnopqrstuvwxyz":
        assert machine.post(machine.event("xid", now, xid=13, text=letter)).status_code == 200
    assert NodeEvent.objects.count() == 10


def test_a_gpu_that_moves_to_another_machine_is_the_same_gpu() -> None:
    here, there = Machine(), Machine("dgx-02", gpus=(UUIDS[1],))
    here.post(here.facts(START), here.batch(START, gpu_percent=1))
    silent(here)
    there.post(there.facts(START + 50), there.batch(START + 50, gpu_percent=2))
    gpu = Gpu.objects.get(uuid=UUIDS[1])
    assert gpu.agent.node == "dgx-02"
    assert [(place.agent.node, place.until is None) for place in gpu.places.all()] == [
        ("dgx-01", False), ("dgx-02", True)
    ]  # fmt: skip


def xid(machine: Machine, at: float, code: int, seq: int, text: str = "GPU has fallen off the bus", **more: Any) -> Any:
    return machine.event("xid", at, gpu=UUIDS[0], xid=code, seq=seq, last_seq=seq, text=text, **more)


def test_a_million_xids_are_a_row() -> None:
    machine = Machine()
    machine.post(machine.facts(START))
    for i in range(4):
        seq = 250_000 * i
        burst = xid(machine, START + i, 95, seq, text=f"Uncontained: FBHUB {i}, seq 0x{i:x}")
        burst["events"][0] |= {"count": 250_000, "last_seq": seq + 249_999}
        machine.post(burst)
    row = NodeEvent.objects.get()
    assert (row.code, row.count, row.gpu and row.gpu.uuid) == (95, 1_000_000, UUIDS[0])


def test_xids_that_differ_are_different_rows() -> None:
    machine = Machine()
    machine.post(machine.facts(START))
    machine.post(xid(machine, START, 13, 1, "Graphics SM Warp Exception"), xid(machine, START, 43, 2, "Ch 00000008"))
    machine.post(xid(machine, START + 7200, 13, 3, "Graphics SM Warp Exception"))
    assert sorted(NodeEvent.objects.values_list("code", "count")) == [(13, 1), (13, 1), (43, 1)]


def test_an_agent_that_lost_its_memory_reports_no_xid_twice() -> None:
    machine = Machine()
    machine.post(machine.facts(START), xid(machine, START, 79, 40), xid(machine, START + 1, 79, 41))
    machine.stream, machine.next = "f" * 16, 0
    machine.post(xid(machine, START, 79, 40), xid(machine, START + 1, 79, 41), xid(machine, START + 9, 79, 42))
    assert NodeEvent.objects.get().count == 3
    machine.boot_id = "b2"  # after a boot the kernel starts counting again
    machine.post(xid(machine, START + 60, 79, 3))
    assert sorted(NodeEvent.objects.values_list("boot_id", "count")) == [("b1", 3), ("b2", 1)]


def test_xids_of_dropped_samples_count_when_they_are_sent_again() -> None:
    """The disk was full for days, and what was given up had reached the portal or not: nobody knows but its rows."""
    machine = Machine()
    machine.post(machine.facts(START), xid(machine, START, 79, 40))
    machine.post(xid(machine, START + 9_000, 13, 90, "SM Warp Exception"), first=30, given_up=28)
    again = {"again": True, "boot_id": "b1"}
    lost = xid(machine, START + 4_000, 31, 60, "MMU Fault", **again)
    machine.post(lost, xid(machine, START, 79, 40, **again))
    assert sorted(NodeEvent.objects.values_list("code", "count")) == [(13, 1), (31, 1), (79, 1)]
    assert machine.agent.kernel_seq == 90
    machine.post(lost)
    assert NodeEvent.objects.get(code=31).count == 1


def test_an_xid_that_nvml_reported_later_is_confirmed_and_counts_once() -> None:
    machine = Machine()
    machine.post(machine.facts(START), xid(machine, START, 79, 40), xid(machine, START + 1, 79, 41))
    machine.post(xid(machine, START, 79, 40, confirmed=True))
    row = NodeEvent.objects.get()
    assert (row.count, row.is_confirmed) == (2, True)


def test_what_lasted_of_a_gpu_is_over_when_it_was_swapped() -> None:
    machine = Machine()
    machine.post(machine.facts(START), machine.event("gpu.lost", START + 5, gpu=UUIDS[1]))
    machine.gpus = (UUIDS[0], UUIDS[5])
    machine.post(machine.facts(START + 500))
    lost = NodeEvent.objects.get(kind="gpu.lost")
    assert (lost.is_open, lost.last_at.timestamp()) == (False, START + 500)


def test_what_lasts_is_open_until_it_is_over() -> None:
    machine = Machine()
    machine.post(machine.facts(START), machine.event("gpu.lost", START + 5, gpu=UUIDS[1]))
    machine.post(machine.event("mount.slow", START + 9, mount="/data", since=START + 7))
    machine.post(machine.event("mount.slow", START + 9, mount="/home", since=START + 8))
    assert NodeEvent.objects.filter(is_open=True).count() == 3
    assert Gpu.objects.get(uuid=UUIDS[1]).lost_at is not None
    machine.post(machine.event("mount.well", START + 67, mount="/data", seconds=60))
    machine.post(machine.event("gpu.back", START + 70, gpu=UUIDS[1]))
    (left,) = NodeEvent.objects.filter(is_open=True)
    assert left.data["mount"] == "/home"
    assert Gpu.objects.get(uuid=UUIDS[1]).lost_at is None
    over = NodeEvent.objects.get(kind="mount.slow", is_open=False)
    assert (over.at.timestamp(), over.last_at.timestamp()) == (START + 7, START + 67)


def test_the_row_has_the_newest_values() -> None:
    machine, now = Machine(), int(time.time())
    machine.post(machine.batch(now - 20, gpu_percent=1, temperature_c=50), machine.batch(now - 10, gpu_percent=80))
    agent = machine.agent
    assert agent.newest["gpus"][UUIDS[0]] == {"gpu_percent": 80, "quiet_since": now}
    assert (agent.sampled_at, agent.version, agent.is_silent()) == (now - 1, "1.0", False)


@pytest.mark.parametrize(
    ("spoil", "field"),
    [
        (lambda post: post.update(version=2), "version"),
        (lambda post: post.update(stream="x"), "stream"),
        (lambda post: post.update(first=-1), "first"),
        (lambda post: post["batches"][0].update(at=-1), "at"),
        (lambda post: post["batches"][0].update(n=10**9), "n"),
        (lambda post: post["batches"][0]["columns"].update(watts=[[1], [2]]), "batches.0.columns.watts"),
        (lambda post: post["batches"][0]["columns"].update(watts=[[1.5] * 10] * 2), "columns"),
        (lambda post: post["batches"][0]["columns"].update(watts=[[2**40] * 10] * 2), "columns"),
        (lambda post: post["batches"][0].update(gpus=["GPU-1", "GPU-1"]), "batches.0.gpus"),
        (lambda post: post["batches"][0].update(gpus=["GPU\0", "GPU-1"]), "gpus"),
        (lambda post: post["batches"][0].update(host={"no name!": 1}), "host"),
        (lambda post: post["batches"][0].update(host={f"load_{i}": 1 for i in range(201)}), "batches.0.host"),
        (lambda post: post["batches"][0].update(events=[{"kind": "Xid!", "at": 1}]), "batches.0.events.0"),
        (lambda post: post["batches"][0].update(events=[{"kind": "x", "at": 1, "t": "x" * 40_000}]), "events.0"),
        (lambda post: post.update(batches=post["batches"] * 61), "batches"),
    ],
)  # fmt: skip
def test_what_is_malformed_is_refused_whole_and_named(spoil: Any, field: str) -> None:
    machine = Machine()
    post = {
        "version": 1, "stream": "a" * 16, "first": 0, "boot_id": "b", "sent_at": time.time(),
        "batches": [machine.batch(START, gpu_percent=1)],
    }  # fmt: skip
    spoil(post)
    answer = machine.send(json.dumps(post).encode())
    assert answer.status_code in {413, 422}
    assert field in answer.json()["errors"][0]["field"] + answer.json()["detail"]
    assert not Frame.objects.exists()


WILD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["version", "stream", "first", "boot_id", "sent_at", "batches"]), WILD))
def test_no_body_is_more_than_malformed(body: Any) -> None:
    base = {"version": 1, "stream": "a" * 16, "first": 0, "boot_id": "b", "sent_at": 1.0, "batches": []}
    with suppress(Malformed):
        wire.parse(json.dumps({**base, **body}).encode())


@given(
    st.dictionaries(st.sampled_from(["gpus", "index", "uuid", "xid", "text", "count", "seq", "last_at", "mount"]), WILD)
)
def test_no_event_is_more_than_odd(more: Any) -> None:
    """Whatever an agent reports of facts, Xids or mounts is stored or left out, and the post is accepted."""
    machine = Machine()
    kinds = ("facts", "xid", "gpu.counters", "mount.slow", "mount.well", "gpu.lost", "agent.gap")
    answer = machine.post(*(machine.event(kind, START, **{"gpu": UUIDS[0], **more}) for kind in kinds))
    assert answer.status_code == 200, answer.content


def test_a_bomb_is_refused() -> None:
    machine = Machine()
    answer = Client().post(
        "/api/v1/nodes/dgx-01/telemetry",
        gzip.compress(b" " * (17 * 1024 * 1024)),
        content_type="application/json",
        headers={"Authorization": f"Bearer {machine.token}", "Content-Encoding": "gzip"},
    )
    assert answer.status_code == 413


def test_a_machine_is_rejected_with_the_token_that_was_replaced() -> None:
    machine = Machine()
    old = machine.token
    machine.token = Machine().token
    assert machine.post(machine.batch(START, gpu_percent=1)).status_code == 200
    machine.token = old
    assert machine.post(machine.batch(START + 10, gpu_percent=1)).status_code == 401
    assert Agent.objects.count() == 1


def test_a_machine_that_was_renamed_goes_on_under_its_new_name() -> None:
    """The buffer is the same, but the portal does not know it by that name: what is gone there is dropped."""
    machine = Machine()
    machine.post(machine.facts(START), *(machine.batch(START + 10 * i, gpu_percent=i) for i in range(5)))
    silent(machine)
    renamed = Machine("dgx-77", next=machine.next)
    assert renamed.post(renamed.facts(START + 60), renamed.batch(START + 60, gpu_percent=9)).json() == {"next": 0}
    assert renamed.post(renamed.facts(START + 60), first=6, given_up=6).json() == {"next": 7}
    assert [gpu.agent.node for gpu in Gpu.objects.order_by("uuid")] == ["dgx-77", "dgx-77"]
    assert not machine.agent.gpus.exists()
