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
from tests.jobs.burnins.bench import Bench, away, good_lines, line

pytestmark = pytest.mark.django_db


def forget_node(bench: Bench) -> None:
    bench.lab.scheduler.machines = [machine for machine in bench.lab.scheduler.machines if machine.name != "dgx-01"]
    bench.read_nodes()


def is_over(bench: Bench) -> bool:
    bench.until_ended()
    return not bench.lab.scheduler.reserved


def until_submitted(bench: Bench) -> None:
    bench.start()
    bench.until(lambda burn_in: burn_in.state == "running")
    bench.tick()
    assert bench.burn_in.detail == "Waits for the scheduler to start it."


def test_a_state_that_stays_unknown(bench: Bench) -> None:
    bench.start()
    bench.until_running()
    bench.lab.scheduler.update_job(bench.burn_in.scheduler_id, state=UNKNOWN)
    bench.lab.scheduler.refuses = lambda what, _: SchedulerError("Invalid job id specified", permanent=True)
    bench.tick()
    BurnIn.objects.update(unknown_since=timezone.now() - UNKNOWN_STATE_FOR / 2)
    assert bench.tick(2).job_ended_at is None
    BurnIn.objects.update(unknown_since=timezone.now() - UNKNOWN_STATE_FOR)
    problem = f"The scheduler no longer reports the state of job {bench.burn_in.scheduler_id}."
    assert (bench.tick().job_ended_at is not None, bench.burn_in.problem) == (True, problem)


def test_a_state_that_is_unknown_for_a_moment(bench: Bench) -> None:
    bench.start()
    bench.until_running()
    bench.lab.scheduler.update_job(bench.burn_in.scheduler_id, state=UNKNOWN)
    assert bench.tick().unknown_since is not None
    bench.lab.scheduler.drain("dgx-01", "fan 3")
    bench.read_nodes()
    bench.tick()
    assert bench.lab.scheduler.cancelled == [], "drained nodes go on with what runs there"
    cancel(bench.user, bench.burn_in)
    bench.tick()
    assert bench.lab.scheduler.cancelled == [bench.burn_in.scheduler_id]
    bench.lab.scheduler.update_job(bench.burn_in.scheduler_id, state="running")
    assert bench.tick().unknown_since is None


def test_a_node_that_is_gone_before_the_tests_are_submitted(bench: Bench) -> None:
    bench.lab.xid(79)
    bench.lab.step()
    bench.lab.scheduler.broken_parts = {"undrain": away()}
    bench.start()
    bench.until(lambda burn_in: burn_in.state == "starting")
    forget_node(bench)
    assert is_over(bench)
    assert bench.burn_in.problem == "The scheduler no longer knows dgx-01."
    assert not bench.lab.scheduler.submissions


def test_a_node_that_is_drained_before_the_tests_are_submitted(bench: Bench) -> None:
    bench.start()
    bench.tick()
    bench.lab.scheduler.drain("dgx-01", "fan 3")
    bench.read_nodes()
    assert is_over(bench)
    assert bench.burn_in.problem == "dgx-01 was drained meanwhile: fan 3"
    assert (bench.lab.scheduler.submissions, bench.lab.scheduler.drained) == ([], {"dgx-01": "fan 3"})


@pytest.mark.parametrize("obstacle", ["gone", "drained", "too late"])
def test_tests_that_the_scheduler_can_no_longer_start_are_cancelled(bench: Bench, obstacle: str) -> None:
    until_submitted(bench)
    if obstacle == "gone":
        forget_node(bench)
    elif obstacle == "drained":
        bench.lab.scheduler.drain("dgx-01", "fan 3")
        bench.read_nodes()
    else:
        BurnIn.objects.update(reserved_at=timezone.now() - WAIT_FOR_JOBS)
    bench.tick()
    assert bench.lab.scheduler.cancelled == [bench.burn_in.scheduler_id]
    bench.end_job("cancelled")
    assert is_over(bench)
    assert (
        bench.burn_in.problem
        == {
            "gone": "The scheduler no longer knows dgx-01.",
            "drained": "dgx-01 was drained meanwhile: fan 3",
            "too late": "The tests could not start within 7 days.",
        }[obstacle]
    )


def test_jobs_that_run_longer_than_the_reservation(bench: Bench) -> None:
    bench.set_node(state="allocated", cpus_used=8)
    bench.start()
    bench.tick(3)
    assert bench.burn_in.state == "waiting"
    BurnIn.objects.update(reserved_at=timezone.now() - WAIT_FOR_JOBS)
    assert is_over(bench)


def test_two_workers_submit_once(bench: Bench) -> None:
    """One was stopped while its submission is on its way: the scheduler does not know the job yet."""
    bench.start()
    bench.until(lambda burn_in: burn_in.state == "starting")
    BurnIn.objects.update(submitting_at=timezone.now())
    bench.tick(3)
    assert bench.lab.scheduler.submissions == []
    BurnIn.objects.update(submitting_at=timezone.now() - submission.LONGEST_CALL - timedelta(seconds=1))
    bench.until_running()
    assert len(bench.lab.scheduler.submissions) == 1


def test_a_failed_node_stays_reserved_until_a_scheduler_that_was_away_for_long_has_drained_it(bench: Bench) -> None:
    bench.start()
    bench.until_running()
    bench.write(
        [*good_lines()[:-1], line("memory", "GPU 1", outcome="failed", detail="12 words differ"), good_lines()[-1]]
    )
    bench.end_job()
    bench.lab.scheduler.broken_parts = {"drain": away()}
    bench.until(lambda _: NodeOrder.objects.open().exists())
    NodeOrder.objects.update(asked_at=timezone.now() - drain.GIVE_UP - timedelta(seconds=1), tried_at=None)
    bench.tick(2)
    assert NodeOrder.objects.get().state == "refused"
    assert (bench.burn_in.state, bool(bench.lab.scheduler.reserved)) == ("returning", True)
    assert bench.burn_in.detail.startswith("dgx-01 is not drained yet. Refused: Given up after 10 min.")
    bench.lab.scheduler.broken_parts = {}
    NodeOrder.objects.update(ended_at=timezone.now() - returning.ORDER_AGAIN)
    bench.until_ended()
    assert list(bench.lab.scheduler.drained) == ["dgx-01"]
    assert bench.row().outcome == "Drained."


def test_burn_ins_that_a_tick_has_no_time_for_do_not_wait_for_the_end_of_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advance, "AT_ONCE", 1)
    for node in ("dgx-01", "dgx-02", "dgx-03"):
        bench.start(node)
    for _ in range(300):
        BurnIn.objects.exclude(state="running").update(tried_at=None)
        bench.tick()
        if BurnIn.objects.filter(state="running").count() == 3:
            break
    assert list(BurnIn.objects.values_list("state", flat=True)) == ["running"] * 3
