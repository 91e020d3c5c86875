"""Test which job holds which GPU, by each source, and how the GPU is used meanwhile."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
from django.conf import LazySettings
from pytest_django import DjangoAssertNumQueries

from nodes.models import Gpu, Holding, Node, QueuedJob
from nodes.telemetry import allocations
from nodes.telemetry.claims import LauncherReport
from tests.nodes.telemetry.holding import four, moment, process, queued
from tests.nodes.telemetry.reporting import UUIDS, Machine

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def on_slurm(settings: LazySettings) -> None:
    settings.VIGIL_SCHEDULER = "slurm"


def allocated() -> dict[str, list[str]]:
    """Return which GPUs each job holds now, as indices."""
    found: dict[str, list[str]] = {}
    for holding in Holding.objects.filter(until=None).select_related("gpu").order_by("gpu__index"):
        found.setdefault(holding.scheduler_id, []).append(f"{holding.gpu.index}")
    return found


def test_indices_of_the_scheduler_show_the_allocation() -> None:
    four()
    queued("7", indices=[0, 1])
    queued("8", indices=[3])
    queued("9", indices=[2], state="pending")
    allocations.update()
    assert allocated() == {"7": ["0", "1"], "8": ["3"]}
    assert Holding.objects.filter(scheduler_id="7").first().since < moment(time.time() - 3000)  # type: ignore[union-attr]


def numbered(minors: list[int | None], **more: Any) -> Machine:
    """Return a machine whose GPUs have these device files, in NVML's order."""
    machine = Machine(gpus=UUIDS[: len(minors)])
    report = machine.facts(time.time())
    for gpu, minor in zip(report["events"][0]["gpus"], minors, strict=True):
        gpu |= {"minor": minor, **more}
    machine.post(report)
    return machine


class TestHowSlurmCounts:
    """It numbers the device files that gres.conf names for a node, from 0 (seen on 22.05 and 24.11)."""

    @pytest.mark.parametrize(
        ("minors", "gpus", "index", "holds"),
        [
            ([1, 0], 2, 0, "1"),
            ([2, 0, 3, 1], 4, 2, "0"),
            ([0, 1, 3], 3, 2, "2"),  # a broken one is in neither
            ([0, 1, 3], 4, 3, "2"),  # it is in gres.conf still
            ([1, 0], None, 0, "1"),  # the node is not reported yet
            ([None, None], 2, 1, "1"),
        ],
    )
    def test_by_files(self, minors: list[int | None], gpus: int | None, index: int, holds: str) -> None:
        numbered(minors)
        if gpus is not None:
            Node.objects.create(name="dgx-01", gpus=gpus)
        queued("7", indices=[index])
        allocations.update()
        assert allocated() == {"7": [holds]}

    def test_the_local_scheduler_counts_as_nvml_does(self, settings: LazySettings) -> None:
        settings.VIGIL_SCHEDULER = "local"
        numbered([1, 0])
        queued("7", indices=[0])
        allocations.update()
        assert allocated() == {"7": ["0"]}

    def test_slices_are_no_gpus(self) -> None:
        machine = numbered([0, 1], mig=True)
        Node.objects.create(name="dgx-01", gpus=14)
        queued("7", indices=[1])
        queued("8", indices=[9])
        allocations.update()
        assert allocated() == {}
        machine.post(process(machine, 0, "7"))
        words = [LauncherReport("7", [UUIDS[0]]), LauncherReport("8", [UUIDS[0]])]
        allocations.update(words)
        assert allocated() == {"7": ["0"], "8": ["0"]}, "two slices of one"


def test_a_job_that_is_gone_holds_no_more() -> None:
    four()
    job = queued("7", indices=[0])
    allocations.update()
    job.delete()
    allocations.update()
    assert allocated() == {}
    holding = Holding.objects.get()
    assert holding.until is not None
    assert abs(holding.until.timestamp() - time.time()) < 30


def test_the_same_number_again_is_another_holding() -> None:
    four()
    queued("7", indices=[0]).delete()
    for indices in ([0], [0]):
        job = queued("7", indices=indices)
        allocations.update()
        job.delete()
        allocations.update()
    assert Holding.objects.count() == 2


def test_processes_show_the_allocation_where_the_scheduler_gives_no_indices() -> None:
    machine = four()
    queued("7", gpus=1)
    machine.post(process(machine, 2, "7"))
    allocations.update()
    assert allocated() == {"7": ["2"]}
    machine.post(machine.batch(int(time.time()), gpu_percent=0))  # between two steps
    allocations.update()
    assert allocated() == {"7": ["2"]}
    QueuedJob.objects.all().delete()
    allocations.update()
    assert allocated() == {}


def test_a_launcher_knows_better_than_the_scheduler() -> None:
    four()
    job = queued("7", indices=[0, 1])
    allocations.update()
    allocations.update([LauncherReport("7", [UUIDS[2], UUIDS[3]])])
    assert allocated() == {"7": ["2", "3"]}
    assert Holding.objects.filter(scheduler_id="7").count() == 2, "what the scheduler counted otherwise never was"
    assert allocations.update() == 0
    assert allocated() == {"7": ["2", "3"]}
    allocations.update([LauncherReport("7", [UUIDS[2], UUIDS[3]]), LauncherReport("7", [UUIDS[1], UUIDS[2]])])
    assert allocated() == {"7": ["1", "2"]}
    job.delete()
    allocations.update()
    assert allocated() == {}


@pytest.mark.parametrize(
    ("claimed", "why"),
    [
        ([0, 1, 2], "more than the scheduler gave it"),
        ([1], "another job's process is there"),
        ([3], "the scheduler gave it to another job"),
        ([7], "no such GPU on its node"),
    ],
)
def test_a_launcher_that_lies_is_not_believed(claimed: list[int], why: str) -> None:
    machine = four()
    other = Machine("dgx-02", gpus=UUIDS[7:])
    other.post(other.facts(time.time()))
    queued("8", indices=[1])
    queued("9", indices=[3])
    queued("7", indices=[0])
    machine.post(process(machine, 1, "8"))
    allocations.update([LauncherReport("7", [UUIDS[i] for i in claimed])])
    assert allocated() == {"7": ["0"], "8": ["1"], "9": ["3"]}, why


def test_jobs_that_the_scheduler_counts_crosswise() -> None:
    machine = four()
    queued("7", indices=[0])
    queued("8", indices=[1])
    words = [LauncherReport("7", [UUIDS[1]]), LauncherReport("8", [UUIDS[0]])]
    allocations.update(words)
    assert allocated() == {"7": ["0"], "8": ["1"]}, "which of them is right nobody knows yet"
    batch = process(machine, 1, "7")
    machine.post({**batch, "processes": [*batch["processes"], {**batch["processes"][0], "gpu": UUIDS[0], "job": "8"}]})
    allocations.update(words)
    assert allocated() == {"7": ["1"], "8": ["0"]}


def test_the_report_of_a_launcher_ends_when_another_job_has_a_process_there() -> None:
    machine = four()
    queued("7", indices=[0])
    word = LauncherReport("7", [UUIDS[1]])
    allocations.update([word])
    assert allocated() == {"7": ["1"]}
    queued("8", indices=[1])
    machine.post(process(machine, 1, "8"))
    allocations.update([word])
    assert allocated() == {"7": ["0"], "8": ["1"]}


def test_a_word_about_a_job_that_nobody_knows() -> None:
    four()
    allocations.update([LauncherReport("7", list(UUIDS))])
    assert allocated() == {}


def test_a_job_with_no_gpu_holds_none() -> None:
    four()
    queued("7")
    allocations.update([LauncherReport("7", [UUIDS[0]])])
    assert allocated() == {}


class TestProcesses:
    """The environment names the job of a process without a control group, and may lie."""

    def test_of_a_task_of_an_array(self) -> None:
        machine = four()
        queued("17_0", indices=[0])
        queued("17_1", indices=[1])
        queued("30_1", gpus=1, user="noor")
        machine.post(process(machine, 0, "18"))  # Slurm's own number of the task
        allocations.update([LauncherReport("17_0", [UUIDS[0]])])
        assert allocated() == {"17_0": ["0"], "17_1": ["1"]}
        assert Holding.objects.get(scheduler_id="17_0").source == "launcher"
        machine.post(process(machine, 2, "31", user="noor"))  # which the scheduler gave no indices
        allocations.update()
        assert allocated() == {"17_0": ["0"], "17_1": ["1"], "30_1": ["2"]}

    def test_what_names_anothers_job(self) -> None:
        machine = four()
        queued("7", gpus=1)
        queued("8", gpus=1, nodes=["dgx-02"])
        Node.objects.create(name="dgx-01", gpus=4)
        machine.post(process(machine, 2, "7", user="mallory"))
        allocations.update()
        assert allocated() == {}
        machine.post(process(machine, 2, "8"))
        allocations.update()
        assert allocated() == {}, "that job runs elsewhere"
        machine.post(process(machine, 2, "7", user="1000"))  # a name that the machine has not resolved yet
        allocations.update()
        assert allocated() == {"7": ["2"]}

    def test_before_the_queue_was_read(self) -> None:
        machine = four()
        machine.post(process(machine, 2, "7"))
        allocations.update()
        holding = Holding.objects.get()
        assert (holding.scheduler_id, holding.user, holding.name, holding.source) == ("7", "mira", "", "processes")
        queued("7", indices=[2])
        allocations.update()
        again = Holding.objects.get()
        assert (again.pk, again.name, again.source) == (holding.pk, "job-7", "scheduler")


class TestInTime:
    def test_a_job_that_is_queued_again_and_runs_at_once(self) -> None:
        """It runs again under the same number before anybody polled."""
        four()
        now = moment(int(time.time()))
        first = now - timedelta(hours=1)
        job = queued("7", indices=[0, 1], started_at=first)
        allocations.update([LauncherReport("7", [UUIDS[0], UUIDS[2]])], now - timedelta(minutes=1))
        QueuedJob.objects.filter(pk=job.pk).update(
            gpu_indices={"dgx-01": [0, 3]}, started_at=now - timedelta(seconds=20), restart_count=1
        )
        allocations.update([], now)
        rows = Holding.objects.order_by("since", "gpu__index")
        assert [(row.gpu.index, row.since, row.until) for row in rows] == [
            (0, first, now - timedelta(seconds=20)),
            (2, first, now - timedelta(seconds=20)),
            (0, now - timedelta(seconds=20), None),
            (3, now - timedelta(seconds=20), None),
        ]

    def test_a_suspended_job_holds(self) -> None:
        """Slurm gives its GPUs to nobody else (seen on 22.05 and 24.11)."""
        four()
        job = queued("7", indices=[0])
        allocations.update()
        QueuedJob.objects.filter(pk=job.pk).update(state="suspended")
        assert allocations.update() == 0
        assert allocated() == {"7": ["0"]}

    def test_on_several_nodes_each_has_separate_indices(self) -> None:
        four()
        other = Machine("dgx-02", gpus=UUIDS[4:])
        other.post(other.facts(time.time()))
        queued("7", nodes=["dgx-01", "dgx-02"], gpus=4, gpu_indices={"dgx-01": [0, 1], "dgx-02": [2, 3]})
        allocations.update()
        assert allocated() == {"7": ["0", "1", "2", "3"]}
        allocations.update([LauncherReport("7", [UUIDS[4], UUIDS[5]])])
        assert allocated() == {"7": ["0", "0", "1", "1"]}, "a report about one node does not cover the other"

    def test_an_agent_that_comes_later(self) -> None:
        queued("7", indices=[0])
        allocations.update()
        assert allocated() == {}
        four()
        allocations.update()
        assert allocated() == {"7": ["0"]}
        assert Holding.objects.get().since < moment(time.time() - 3000), "since the job began"

    def test_a_node_that_its_agent_calls_otherwise(self) -> None:
        """Names are equal or they are not: a token for `dgx-01.lab` must not speak for `dgx-01`."""
        machine = Machine("dgx-01.lab", gpus=UUIDS[:4])
        machine.post(machine.facts(time.time()))
        Node.objects.create(name="dgx-01", gpus=4)
        queued("7", indices=[0])
        allocations.update([LauncherReport("7", [UUIDS[0]])])
        assert allocated() == {}
        machine.post(process(machine, 0, "7"))
        allocations.update()
        assert allocated() == {"7": ["0"]}, "as its processes show"

    def test_what_comes_back_after_a_break_holds_from_then_on(self) -> None:
        machine = four()
        queued("7", indices=[0])
        now = moment(time.time())
        allocations.update([], now - timedelta(minutes=5))
        Gpu.objects.filter(uuid=UUIDS[0]).update(gone_at=now)  # as while its driver is reloaded
        allocations.update([], now - timedelta(minutes=4))
        machine.post(machine.facts(time.time()))
        allocations.update([], now)
        first, second = Holding.objects.order_by("since")
        assert first.until == second.since == now - timedelta(minutes=4)

    def test_a_job_has_ended_where_another_began(self) -> None:
        """The queue is read every 15 s: without this both would hold it for so long."""
        four()
        now = moment(int(time.time()))
        job = queued("7", indices=[0])
        allocations.update([], now - timedelta(minutes=1))
        job.delete()
        queued("8", indices=[0], started_at=now - timedelta(seconds=12))
        allocations.update([], now)
        assert Holding.objects.get(scheduler_id="7").until == now - timedelta(seconds=12)

    def test_a_clock_that_is_ahead_makes_no_end_before_the_beginning(self) -> None:
        four()
        ahead = moment(int(time.time()) + 600)
        job = queued("7", indices=[0], started_at=ahead)
        allocations.update()
        job.delete()
        allocations.update()
        assert Holding.objects.get().until == ahead


def test_many_machines_take_no_more_queries_than_a_single_machine(
    django_assert_max_num_queries: DjangoAssertNumQueries,
) -> None:
    for node in range(5):
        machine = Machine(f"dgx-{node}", gpus=tuple(f"GPU-{node}-{i}" for i in range(4)))
        machine.post(machine.facts(time.time()))
        queued(f"{node}", node=machine.node, indices=[0, 1])
    words = [LauncherReport(f"{node}", [f"GPU-{node}-{i}" for i in (0, 1)]) for node in range(5)]
    with django_assert_max_num_queries(10):
        assert allocations.update(words) == 10
    with django_assert_max_num_queries(6):
        assert allocations.update(words) == 0
