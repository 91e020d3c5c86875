"""Who holds which GPU, by whoever tells, and what it does meanwhile."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from nodes.models import Gpu, GpuUse, Holding, QueuedJob
from nodes.telemetry import holdings, merge, use
from nodes.telemetry.fields import WINDOW_S
from tests.nodes.telemetry.reporting import UUIDS, Machine

pytestmark = pytest.mark.django_db


def moment(second: float) -> datetime:
    return datetime.fromtimestamp(second, UTC)


def queued(scheduler_id: str, node: str = "dgx-01", indices: list[int] | None = None, **more: Any) -> QueuedJob:
    fields = {
        "name": f"job-{scheduler_id}", "user": "mira", "state": "running", "nodes": [node], "gpus": len(indices or ()),
        "gpu_indices": {node: indices} if indices else {}, "started_at": moment(time.time() - 3600),
    }  # fmt: skip
    return QueuedJob.objects.create(scheduler_id=scheduler_id, **fields | more)


def held() -> dict[str, list[str]]:
    """Which GPUs each job holds now, as indices."""
    found: dict[str, list[str]] = {}
    for one in Holding.objects.filter(until=None).select_related("gpu").order_by("gpu__index"):
        found.setdefault(one.scheduler_id, []).append(f"{one.gpu.index}")
    return found


def four() -> Machine:
    machine = Machine(gpus=UUIDS[:4])
    machine.post(machine.facts(time.time()), machine.batch(int(time.time()) - 10, gpu_percent=50))
    return machine


def process(machine: Machine, gpu: int, job: str, **more: Any) -> dict[str, Any]:
    batch = machine.batch(int(time.time()) - 10, gpu_percent=50)
    one = {"gpu": UUIDS[gpu], "pid": 17, "user": "mira", "name": "python", "memory_mib": 5, "job": job}
    return {**batch, "processes": [{**one, **more}]}


def test_the_schedulers_indices_tell() -> None:
    four()
    queued("7", indices=[0, 1])
    queued("8", indices=[3])
    queued("9", indices=[2], state="pending")
    holdings.update()
    assert held() == {"7": ["0", "1"], "8": ["3"]}
    assert Holding.objects.filter(scheduler_id="7").first().since < moment(time.time() - 3000)  # type: ignore[union-attr]


def test_slurm_counts_by_device_files() -> None:
    machine = Machine(gpus=UUIDS[:2])
    told = machine.facts(time.time())
    for gpu, minor in zip(told["events"][0]["gpus"], (1, 0), strict=True):
        gpu["minor"] = minor
    machine.post(told)
    queued("7", indices=[0])
    holdings.update()
    assert held() == {"7": ["1"]}


def test_a_job_that_is_gone_holds_no_more() -> None:
    four()
    job = queued("7", indices=[0])
    holdings.update()
    job.delete()
    holdings.update()
    assert held() == {}
    one = Holding.objects.get()
    assert one.until is not None
    assert abs(one.until.timestamp() - time.time()) < 30


def test_the_same_number_again_is_another_holding() -> None:
    four()
    queued("7", indices=[0]).delete()
    for indices in ([0], [0]):
        job = queued("7", indices=indices)
        holdings.update()
        job.delete()
        holdings.update()
    assert Holding.objects.count() == 2


def test_processes_tell_where_the_scheduler_gives_no_indices() -> None:
    machine = four()
    queued("7", gpus=1)
    machine.post(process(machine, 2, "7"))
    holdings.update()
    assert held() == {"7": ["2"]}
    machine.post(machine.batch(int(time.time()), gpu_percent=0))  # between two steps
    holdings.update()
    assert held() == {"7": ["2"]}
    QueuedJob.objects.all().delete()
    holdings.update()
    assert held() == {}


def test_a_launcher_knows_better_than_the_scheduler() -> None:
    four()
    job = queued("7", indices=[0, 1])
    holdings.update()
    holdings.told_by_launcher(job, [UUIDS[2], UUIDS[3]], moment(time.time()))
    assert held() == {"7": ["2", "3"]}
    holdings.update()
    assert held() == {"7": ["2", "3"]}
    job.delete()
    holdings.update()
    assert held() == {}


@pytest.mark.parametrize(
    ("claimed", "why"),
    [
        ([0, 1, 2], "more than the scheduler gave it"),
        ([1], "another job's process is there"),
        ([7], "no such GPU on its node"),
    ],
)
def test_a_launcher_that_lies_is_not_believed(claimed: list[int], why: str) -> None:
    machine = four()
    other = Machine("dgx-02", gpus=UUIDS[7:])
    other.post(other.facts(time.time()))
    queued("8", indices=[1])
    job = queued("7", indices=[0], nodes=["dgx-01"])
    machine.post(process(machine, 1, "8"))
    holdings.update()
    holdings.told_by_launcher(job, [UUIDS[i] for i in claimed], moment(time.time()))
    assert held() == {"7": ["0"], "8": ["1"]}, why


def test_what_a_jobs_gpus_did_is_added_up_by_day() -> None:
    machine = Machine(gpus=UUIDS[:2])
    start = 1_796_000_000 // 86_400 * 86_400 - 2 * WINDOW_S  # before midnight
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


def test_a_gpu_that_is_held_and_idle_is_found_with_and_without_a_process() -> None:
    machine, now = Machine(gpus=UUIDS[:4]), int(time.time())
    queued("7", indices=[0, 1, 2, 3])
    machine.post(machine.facts(now))
    holdings.update()
    # 0 works, 1 does nothing with a process, 2 without one; 3 (a slice) does not tell.
    rows = [[5] * 10, [0] * 10, [0] * 10, [None] * 10]
    for at in range(now - 1200, now, 10):
        last = {**machine.batch(at, gpu_percent=rows), "processes": [{"gpu": UUIDS[1], "pid": 5, "job": "7"}]}
        machine.post(last)
    found = [(one.holding.gpu.index, one.has_process) for one in use.idle_now()]
    assert sorted(found) == [(1, True), (2, False)]
    assert use.idle_now(moment(now - 301)) == [], "not yet a quarter of an hour"
    machine.post(machine.batch(now, gpu_percent=[[0] * 10, [0] * 10, [0] * 9 + [30], [None] * 10]))
    assert [one.holding.gpu.index for one in use.idle_now()] == [1]


def test_nothing_is_said_of_a_machine_that_is_silent() -> None:
    machine, now = Machine(gpus=UUIDS[:1]), int(time.time())
    queued("7", indices=[0])
    machine.post(machine.facts(now))
    holdings.update()
    for at in range(now - 1200, now, 10):
        machine.post(machine.batch(at, gpu_percent=0))
    assert len(use.idle_now()) == 1
    assert use.idle_now(moment(now) + timedelta(minutes=5)) == []


def test_a_process_on_a_gpu_that_nobody_holds() -> None:
    machine = four()
    queued("7", indices=[0])
    holdings.update()
    machine.post(process(machine, 2, "", name="<script>"))
    assert [(gpu.index, one["name"]) for gpu, one in use.unheld()] == [(2, "<script>")]
    machine.post(process(machine, 0, "7"))
    assert use.unheld() == []
