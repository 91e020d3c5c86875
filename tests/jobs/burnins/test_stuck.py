"""What could keep a burn-in waiting for ever ends it, with the reason; an outage of the scheduler does not."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.utils import timezone

from jobs.burnins import advance, returning, submission
from jobs.burnins.advance import UNKNOWN_STATE_FOR, WAIT_FOR_JOBS
from jobs.burnins.start import cancel
from nodes.cluster import drain
from nodes.models import BurnIn, NodeOrder
from nodes.schedulers.base import UNKNOWN, SchedulerError
from tests.jobs.burnins.simulated_cluster import SimulatedCluster, away, good_lines, line

pytestmark = pytest.mark.django_db


def forget_node(cluster: SimulatedCluster) -> None:
    cluster.lab.scheduler.machines = [machine for machine in cluster.lab.scheduler.machines if machine.name != "dgx-01"]
    cluster.read_nodes()


def is_over(cluster: SimulatedCluster) -> bool:
    cluster.until_ended()
    return not cluster.lab.scheduler.reserved


def until_submitted(cluster: SimulatedCluster) -> None:
    cluster.start()
    cluster.until(lambda burn_in: burn_in.state == "running")
    cluster.tick()
    assert cluster.burn_in.detail == "Waits for the scheduler to start it."


def test_a_state_that_stays_unknown(cluster: SimulatedCluster) -> None:
    cluster.start()
    cluster.until_running()
    cluster.lab.scheduler.update_job(cluster.burn_in.scheduler_id, state=UNKNOWN)
    cluster.lab.scheduler.refuses = lambda what, _: SchedulerError("Invalid job id specified", permanent=True)
    cluster.tick()
    BurnIn.objects.update(unknown_since=timezone.now() - UNKNOWN_STATE_FOR / 2)
    assert cluster.tick(2).job_ended_at is None
    BurnIn.objects.update(unknown_since=timezone.now() - UNKNOWN_STATE_FOR)
    problem = f"The scheduler no longer reports the state of job {cluster.burn_in.scheduler_id}."
    assert (cluster.tick().job_ended_at is not None, cluster.burn_in.problem) == (True, problem)


def test_a_state_that_is_unknown_for_a_moment(cluster: SimulatedCluster) -> None:
    cluster.start()
    cluster.until_running()
    cluster.lab.scheduler.update_job(cluster.burn_in.scheduler_id, state=UNKNOWN)
    assert cluster.tick().unknown_since is not None
    cluster.lab.scheduler.drain("dgx-01", "fan 3")
    cluster.read_nodes()
    cluster.tick()
    assert cluster.lab.scheduler.cancelled == [], "drained nodes go on with what runs there"
    cancel(cluster.user, cluster.burn_in)
    cluster.tick()
    assert cluster.lab.scheduler.cancelled == [cluster.burn_in.scheduler_id]
    cluster.lab.scheduler.update_job(cluster.burn_in.scheduler_id, state="running")
    assert cluster.tick().unknown_since is None


def test_a_node_that_is_gone_before_the_tests_are_submitted(cluster: SimulatedCluster) -> None:
    cluster.lab.xid(79)
    cluster.lab.step()
    cluster.lab.scheduler.broken_parts = {"undrain": away()}
    cluster.start()
    cluster.until(lambda burn_in: burn_in.state == "starting")
    forget_node(cluster)
    assert is_over(cluster)
    assert cluster.burn_in.problem == "The scheduler no longer knows dgx-01."
    assert not cluster.lab.scheduler.submissions


def test_a_node_that_is_drained_before_the_tests_are_submitted(cluster: SimulatedCluster) -> None:
    cluster.start()
    cluster.tick()
    cluster.lab.scheduler.drain("dgx-01", "fan 3")
    cluster.read_nodes()
    assert is_over(cluster)
    assert cluster.burn_in.problem == "dgx-01 was drained meanwhile: fan 3"
    assert (cluster.lab.scheduler.submissions, cluster.lab.scheduler.drained) == ([], {"dgx-01": "fan 3"})


@pytest.mark.parametrize("obstacle", ["gone", "drained", "too late"])
def test_tests_that_the_scheduler_can_no_longer_start_are_cancelled(cluster: SimulatedCluster, obstacle: str) -> None:
    until_submitted(cluster)
    if obstacle == "gone":
        forget_node(cluster)
    elif obstacle == "drained":
        cluster.lab.scheduler.drain("dgx-01", "fan 3")
        cluster.read_nodes()
    else:
        BurnIn.objects.update(reserved_at=timezone.now() - WAIT_FOR_JOBS)
    cluster.tick()
    assert cluster.lab.scheduler.cancelled == [cluster.burn_in.scheduler_id]
    cluster.end_job("cancelled")
    assert is_over(cluster)
    assert (
        cluster.burn_in.problem
        == {
            "gone": "The scheduler no longer knows dgx-01.",
            "drained": "dgx-01 was drained meanwhile: fan 3",
            "too late": "The tests could not start within 7 days.",
        }[obstacle]
    )


def test_jobs_that_run_longer_than_the_reservation(cluster: SimulatedCluster) -> None:
    cluster.set_node(state="allocated", cpus_used=8)
    cluster.start()
    cluster.tick(3)
    assert cluster.burn_in.state == "waiting"
    BurnIn.objects.update(reserved_at=timezone.now() - WAIT_FOR_JOBS)
    assert is_over(cluster)


def test_two_workers_submit_once(cluster: SimulatedCluster) -> None:
    """The burn-in was stopped during its submission: the scheduler does not have the job yet."""
    cluster.start()
    cluster.until(lambda burn_in: burn_in.state == "starting")
    BurnIn.objects.update(submitting_at=timezone.now())
    cluster.tick(3)
    assert cluster.lab.scheduler.submissions == []
    BurnIn.objects.update(submitting_at=timezone.now() - submission.MAX_CALL_DURATION - timedelta(seconds=1))
    cluster.until_running()
    assert len(cluster.lab.scheduler.submissions) == 1


def test_a_failed_node_stays_reserved_until_a_scheduler_that_was_away_for_long_has_drained_it(
    cluster: SimulatedCluster,
) -> None:
    cluster.start()
    cluster.until_running()
    cluster.write(
        [*good_lines()[:-1], line("memory", "GPU 1", outcome="failed", detail="12 words differ"), good_lines()[-1]]
    )
    cluster.end_job()
    cluster.lab.scheduler.broken_parts = {"drain": away()}
    cluster.until(lambda _: NodeOrder.objects.open().exists())
    NodeOrder.objects.update(asked_at=timezone.now() - drain.GIVE_UP - timedelta(seconds=1), tried_at=None)
    cluster.tick(2)
    assert NodeOrder.objects.get().state == "refused"
    assert (cluster.burn_in.state, bool(cluster.lab.scheduler.reserved)) == ("returning", True)
    assert cluster.burn_in.detail.startswith("dgx-01 is not drained yet. Refused: Given up after 10 min.")
    cluster.lab.scheduler.broken_parts = {}
    NodeOrder.objects.update(ended_at=timezone.now() - returning.ORDER_RETRY_AFTER)
    cluster.until_ended()
    assert list(cluster.lab.scheduler.drained) == ["dgx-01"]
    assert cluster.row().outcome == "Drained."


def test_burn_ins_that_a_tick_has_no_time_for_do_not_wait_for_the_end_of_others(
    cluster: SimulatedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advance, "MAX_PER_TICK", 1)
    for node in ("dgx-01", "dgx-02", "dgx-03"):
        cluster.start(node)
    for _ in range(300):
        BurnIn.objects.exclude(state="running").update(tried_at=None)
        cluster.tick()
        if BurnIn.objects.filter(state="running").count() == 3:
            break
    assert list(BurnIn.objects.values_list("state", flat=True)) == ["running"] * 3
