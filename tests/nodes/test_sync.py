"""Test the cluster as rows: what the scheduler reports is there after a poll, and stays while it is silent."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from nodes.cluster import sync
from nodes.models import Association, License, Node, Partition, Qos, QueuedJob, Reading, Reservation
from nodes.schedulers import cluster
from nodes.schedulers.base import NodeStatus, SchedulerError
from nodes.schedulers.cluster import AccountsInfo, Limits
from tests.jobs.schedulers import ScriptedScheduler

pytestmark = pytest.mark.django_db
Part = Reading.Part


def queued(number: int, **facts: Any) -> cluster.QueuedJobInfo:
    return cluster.QueuedJobInfo(
        **{"scheduler_id": str(number), "name": f"j{number}", "user": "mira", "state": "pending"} | facts
    )


def later(seconds: float) -> None:
    """Pretend that every part was last polled so long ago."""
    for reading in Reading.objects.all():
        assert reading.asked_at
        Reading.objects.filter(pk=reading.pk).update(asked_at=reading.asked_at - timedelta(seconds=seconds))


def test_everything_that_is_reported_is_there() -> None:
    scheduler = ScriptedScheduler(
        machines=[
            NodeStatus(
                name="dgx-01", state="mixed", partitions=("gpu", "long"), features=("h100", "nvlink"), gpus=8,
                gpus_used=2, gpus_allocated=(0, 3), load=12.34567, reason="XID 79", reason_by="root",
                booted_at=1_700_000_000.0, reason_at=1_750_000_000.5, cpus=224, cpus_used=52, memory_mib=2_000_000,
                memory_used_mib=500_000,
            )
        ],
        queued=[
            queued(7, state="running", nodes=("dgx-01",), gpu_indices={"dgx-01": (0, 3)}, started_at=1_750_000_000.0),
            queued(8, reason="Priority", priority=4_294_901_759),
        ],
        divided=[cluster.PartitionInfo(name="gpu", is_default=True, nodes=("dgx-01",), max_time_s=86_400)],
        reserved=[cluster.ReservationInfo(name="friday", starts_at=1_800_000_000.0, users=("mira",))],
        licensed=[cluster.LicenseInfo(name="matlab", total=2, used=1)],
        accounted=AccountsInfo(
            qos=(cluster.QosInfo(name="small", limits=Limits(user={"gres/gpu": 2})),),
            associations=(
                cluster.AssociationInfo(account="lab"),
                cluster.AssociationInfo(account="lab", user="mira", fair_share=0.5, limits=Limits(group={"cpu": 9})),
            ),
        ),
    )  # fmt: skip
    sync.sync(scheduler)
    node = Node.objects.get()
    assert (node.partitions, node.features, node.gpus_allocated) == (["gpu", "long"], ["h100", "nvlink"], [0, 3])
    assert (node.load, node.reason_by) == (12.3, "root")
    assert node.reason_at == datetime.fromtimestamp(1_750_000_000.5, UTC)
    assert (node.gpus_free, node.cpus_free, node.memory_free_mib) == (6, 172, 1_500_000)
    running, waiting = QueuedJob.objects.order_by("scheduler_id")
    assert running.gpu_indices == {"dgx-01": [0, 3]}
    assert (waiting.priority, waiting.started_at) == (4_294_901_759, None)
    assert Partition.objects.get().max_time_s == 86_400
    assert Reservation.objects.get().users == ["mira"]
    assert (License.objects.get().total, License.objects.get().free) == (2, 1)
    assert Qos.objects.get().limits["user"] == {"gres/gpu": 2}
    assert Association.objects.get(user="mira").limits["group"] == {"cpu": 9}
    assert {reading.part for reading in sync.readings().values() if reading.read_at} == set(Part.values)


def test_what_is_no_longer_reported_is_gone_and_what_is_made_up_stays() -> None:
    Node.objects.create(name="made-up", is_made_up=True)
    Node.objects.create(name="dgx-02", is_made_up=True, gpus=1)
    scheduler = ScriptedScheduler(
        machines=[NodeStatus(name=f"dgx-0{n}", state="idle") for n in range(1, 4)], queued=[queued(1), queued(2)]
    )
    sync.read(scheduler)
    assert Node.objects.reported().count() == 3, "a made-up one that turns out to be there is the real one"
    scheduler.machines, scheduler.queued = scheduler.machines[:1], [queued(2)]
    sync.read(scheduler)
    assert set(Node.objects.values_list("name", flat=True)) == {"dgx-01", "made-up"}
    assert QueuedJob.objects.get().scheduler_id == "2"


@pytest.mark.parametrize("problem", ["unparsable", "unstorable"])
def test_a_node_keeps_its_row_while_a_record_cannot_be_read(problem: str) -> None:
    machines = [NodeStatus(name=f"dgx-0{n}", state="idle", memory_mib=1) for n in range(1, 4)]
    scheduler = ScriptedScheduler(machines=machines, queued=[queued(1), queued(2)])
    sync.read(scheduler)
    ids = dict(Node.objects.values_list("name", "pk"))
    scheduler.machines = machines[:1]
    if problem == "unparsable":
        scheduler.unreadable = {"nodes": 1, "queue": 1}
    else:
        scheduler.machines = [*machines[:1], replace(machines[1], memory_mib=2**70)]
    scheduler.queued = []
    for _ in range(2):
        sync.read(scheduler)
        assert dict(Node.objects.values_list("name", "pk")) == ids, "it may be any of those that are missing"
        assert not QueuedJob.objects.exists(), "a job that has ended is not waited for"
        assert sync.readings()["nodes"].unreadable == 1
    scheduler.machines, scheduler.unreadable = [machines[0], replace(machines[1], memory_mib=2)], {}
    sync.read(scheduler)
    assert dict(Node.objects.values_list("name", "memory_mib")) == {"dgx-01": 1, "dgx-02": 2}


def test_only_what_changed_is_written() -> None:
    scheduler = ScriptedScheduler(machines=[NodeStatus(name=f"n{n}", state="idle", load=0.01 * n) for n in range(5)])
    sync.read(scheduler)
    ids = dict(Node.objects.values_list("name", "pk"))
    Node.objects.update(reason="a mark of this test's")
    scheduler.machines[3] = replace(scheduler.machines[3], state="drained", reason="fan")
    scheduler.machines[4] = replace(scheduler.machines[4], load=0.041)
    sync.read(scheduler)
    assert {node.name: node.reason for node in Node.objects.all()} == {
        "n3": "fan", **dict.fromkeys(("n0", "n1", "n2", "n4"), "a mark of this test's"),
    }  # fmt: skip
    assert dict(Node.objects.values_list("name", "pk")) == ids


def test_each_part_is_requested_at_its_interval() -> None:
    scheduler = ScriptedScheduler()
    assert sync.is_due()
    sync.sync(scheduler)
    assert sorted(scheduler.requests) == sorted(Part.values)
    assert not sync.is_due()
    for seconds, parts in ((6, ["nodes"]), (10, ["nodes", "queue"])):
        scheduler.requests.clear()
        later(seconds)
        assert sync.is_due()
        sync.sync(scheduler)
        assert scheduler.requests == parts
    sync.hurry(Part.NODES)
    assert sync.is_due()


def test_a_slow_scheduler_gets_no_more_than_a_tick_has(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = ScriptedScheduler()
    monkeypatch.setattr(sync, "BUDGET_S", -1.0)
    sync.sync(scheduler)
    assert not scheduler.requests, "nothing is begun once the time is over; the next tick continues"
    assert sync.is_due()


def test_a_failure_keeps_the_rows_and_their_age_is_shown() -> None:
    scheduler = ScriptedScheduler(queued=[queued(1)])
    sync.read(scheduler)
    before = timezone.now()
    scheduler.broken_parts["queue"] = SchedulerError("Slurm did not answer for 10 s.")
    sync.read(scheduler)
    reading = sync.readings()["queue"]
    assert reading.error == "Slurm did not answer for 10 s."
    assert reading.read_at is not None
    assert reading.failing_since is not None
    assert reading.read_at < before < reading.failing_since
    assert QueuedJob.objects.count() == 1
    assert sync.readings()["nodes"].error == "", "the others have nothing to do with it"

    since = reading.failing_since
    sync.read(scheduler, Part.QUEUE)
    assert sync.readings()["queue"].failing_since == since
    scheduler.broken_parts.clear()
    sync.read(scheduler, Part.QUEUE)
    mended = sync.readings()["queue"]
    assert (mended.error, mended.failing_since) == ("", None)


def test_words_that_no_database_takes() -> None:
    sync.read(ScriptedScheduler(queued=[queued(1, name="a\0b", reason="x" * 5000, account="y" * 400)]))
    row = QueuedJob.objects.get()
    assert (row.name, len(row.reason), len(row.account)) == ("ab", 5000, 255)


def test_a_large_cluster_takes_well_under_a_second() -> None:
    nodes = [NodeStatus(name=f"dgx-{n:04}", state="idle", partitions=("gpu",), features=("h100",)) for n in range(1000)]
    queue = [queued(n, nodes=(f"dgx-{n % 1000:04}",), gpu_indices={f"dgx-{n % 1000:04}": (0, 1)}) for n in range(5000)]
    scheduler = ScriptedScheduler(machines=nodes, queued=queue)
    sync.read(scheduler)
    assert (Node.objects.count(), QueuedJob.objects.count()) == (1000, 5000)
    for n in range(20):
        scheduler.machines[n] = replace(scheduler.machines[n], state="mixed", gpus_used=n)
        scheduler.queued[n] = replace(scheduler.queued[n], state="running")
    del scheduler.queued[-20:]
    best = min(_timed(scheduler, change) for change in range(3))
    assert best < 0.5
    assert QueuedJob.objects.filter(state="running").count() == 20
    with CaptureQueriesContext(
        connection,
    ) as queries:
        sync.read(scheduler, Part.NODES, Part.QUEUE)
    assert not [query for query in queries if "node" in query["sql"] and query["sql"].startswith(("DELETE", "INSERT"))]


def _timed(scheduler: ScriptedScheduler, change: int) -> float:
    for n in range(20):
        scheduler.machines[n] = replace(scheduler.machines[n], gpus_used=100 * change + n)
        scheduler.queued[n] = replace(scheduler.queued[n], priority=100 * change + n)
    start = time.process_time()
    sync.read(scheduler, Part.NODES, Part.QUEUE)
    return time.process_time() - start
