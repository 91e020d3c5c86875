"""Test the use of allocated GPUs: hours by day, idle ones, and unallocated ones."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from nodes.models import Gpu, GpuUse, Holding
from nodes.telemetry import allocations, merge, use
from nodes.telemetry.fields import WINDOW_S
from tests.nodes.telemetry.holding import four, moment, process, queued
from tests.nodes.telemetry.reporting import UUIDS, Machine

pytestmark = pytest.mark.django_db


def test_what_a_jobs_gpus_did_is_added_up_by_day() -> None:
    machine = Machine(gpus=UUIDS[:2])
    start = 1_763_000_000 // 86_400 * 86_400 - 2 * WINDOW_S  # before midnight
    start = start // WINDOW_S * WINDOW_S
    machine.post(machine.facts(start))
    busy, idle = (Gpu.objects.get(uuid=uuid) for uuid in UUIDS[:2])
    agent = machine.agent
    for gpu, since, until in ((busy, start, None), (idle, start + 100, start + 1100)):
        Holding.objects.create(
            gpu=gpu, agent=agent, scheduler_id="7", user="mira", source="scheduler", since=moment(since),
            until=moment(until) if until else None,
        )  # fmt: skip
    end = start + 4 * WINDOW_S
    machine.fill(start, end + 100, gpu_percent=[[50] * 10, [0] * 10])
    assert merge.merge(now=end + 100) > 0
    days = list(GpuUse.objects.order_by("day"))
    midnight = (start // 86_400 + 1) * 86_400
    assert [day.day for day in days] == [moment(start).date(), moment(midnight).date()]
    first = days[0]
    assert first.held_s == (midnight - start) + 1000
    assert first.used_s == (midnight - start) / 2
    assert first.idle_s == 1000
    assert days[1].held_s == end - midnight


def test_an_allocated_idle_gpu_is_found_with_and_without_a_process() -> None:
    machine, now = Machine(gpus=UUIDS[:4]), int(time.time())
    queued("7", indices=[0, 1, 2, 3])
    machine.post(machine.facts(now))
    allocations.update()
    # 0 works, 1 is idle with a process, 2 without; 3 (a slice) does not report its use.
    rows = [[5] * 10, [0] * 10, [0] * 10, [None] * 10]
    for at in range(now - 1200, now, 10):
        last = {**machine.batch(at, gpu_percent=rows), "processes": [{"gpu": UUIDS[1], "pid": 5, "job": "7"}]}
        machine.post(last)
    found = [(item.holding.gpu.index, item.has_process) for item in use.idle_now()]
    assert sorted(found) == [(1, True), (2, False)]
    assert use.idle_now(moment(now - 301)) == [], "not yet a quarter of an hour"
    machine.post(machine.batch(now, gpu_percent=[[0] * 10, [0] * 10, [0] * 9 + [30], [None] * 10]))
    assert [item.holding.gpu.index for item in use.idle_now()] == [1]


def test_a_silent_machine_has_no_idle_gpus() -> None:
    machine, now = Machine(gpus=UUIDS[:1]), int(time.time())
    queued("7", indices=[0])
    machine.post(machine.facts(now))
    allocations.update()
    for at in range(now - 1200, now, 10):
        machine.post(machine.batch(at, gpu_percent=0))
    assert len(use.idle_now()) == 1
    assert use.idle_now(moment(now) + timedelta(minutes=5)) == []


def test_a_process_on_a_gpu_that_nobody_holds() -> None:
    machine = four()
    queued("7", indices=[0])
    allocations.update()
    machine.post(process(machine, 2, "", name="<script>"))
    assert [(gpu.index, item["name"]) for gpu, item in use.processes_on_free_gpus()] == [(2, "<script>")]
    machine.post(process(machine, 0, "7"))
    assert use.processes_on_free_gpus() == []
