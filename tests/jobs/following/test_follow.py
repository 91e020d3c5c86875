"""Test the follower, tick by tick, with a scheduler that reports what the test sets."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from jobs import lease
from jobs.disk import rundir
from jobs.following import follow
from jobs.models import Attempt, Checkpoint, Event, Job
from nodes.models import Node
from portal.models import Lease, User
from tests.jobs.following.launchers import launched, newest
from tests.jobs.schedulers import DGX_01, ScriptedScheduler
from tests.jobs.submissions import submit_spec
from tests.lab import a_checkpoint

pytestmark = pytest.mark.django_db


EXCEPTION = {"rank": 1, "incarnation": 0, "kind": "exception", "error": "ValueError: shapes differ"}


def test_from_submission_to_close(job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]) -> None:
    assert newest().scheduler_id == "101"
    scheduler.update_job("101", state="pending", reason="Resources")
    tick()
    assert (newest().state, newest().reason) == ("pending", "Resources")
    started = timezone.now().timestamp()
    scheduler.update_job("101", state="running", reason="", nodes=("dgx-01",), started_at=started)
    launched(newest())
    tick()
    attempt = newest()
    assert (attempt.state, attempt.nodes, attempt.directory) == ("running", ["dgx-01"], "attempt-1")
    assert attempt.started_at is not None
    version = attempt.version
    tick()
    assert newest().version == version  # nothing changed, nothing is published
    scheduler.update_job("101", state="completed", exit_code=0, ended_at=started + 5)
    tick()
    attempt = newest()
    assert (attempt.state, attempt.cause, attempt.exit_code, attempt.reason) == ("completed", "completed", 0, "")
    assert attempt.decided_at is not None
    assert attempt.closed_at is not None
    assert attempt.token_digest == ""
    assert Attempt.objects.count() == 1


def test_nodes_become_rows(job: Job) -> None:
    node = Node.objects.get()
    assert (node.name, node.cpus, node.gpus, node.gpu_type) == ("dgx-01", 8, 4, "h100")


def test_a_lost_node_is_a_new_attempt_from_the_newest_checkpoint(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    scheduler.update_job("101", state="running")
    launched(newest())
    a_checkpoint(job, 100)
    tick()
    scheduler.update_job("101", state="node_fail")
    tick()
    first, second = Attempt.objects.order_by("number")
    assert (first.state, first.cause) == ("node_fail", "node_fail")
    assert "from step 100 as attempt 2. Restart 1 of 1." in first.decision
    assert (second.origin, second.scheduler_id) == ("restarted", "102")
    assert second.resume_from is not None
    assert second.resume_from.step == 100
    assert Job.objects.get().latest == second
    a_checkpoint(job, 200, attempt=second)
    scheduler.update_job("102", state="node_fail")
    tick()
    second.refresh_from_db()
    assert "its 1 restarts are used up" in second.decision
    assert Attempt.objects.count() == 2


def test_the_same_cause_twice_with_no_checkpoint_between_stops(
    oskar: User, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    Job.objects.update(spec={**job.spec, "restart": {"max_restarts": 9, "in_place": 0}})
    for scheduler_id in ("101", "102"):
        scheduler.update_job(scheduler_id, state="node_fail")
        tick()
    assert "Failed twice" in newest().decision
    assert Attempt.objects.count() == 2


def test_an_exception_is_not_repeated_and_named(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    launched(newest(), exit_code=1, cause="failed", first_failure=EXCEPTION)
    scheduler.update_job("101", state="failed", exit_code=1)
    tick()
    attempt = newest()
    assert (attempt.cause, attempt.reason) == ("exception", "Rank 1: ValueError: shapes differ")
    assert attempt.failure["rank"] == 1
    assert "Not restarted: " in attempt.decision
    assert Attempt.objects.count() == 1


def test_what_left_unsaved_is_reported_and_not_begun_again(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    launched(newest(), exit_code=1, cause="unsaved", first_failure=None)
    scheduler.update_job("101", state="failed", exit_code=1)
    tick()
    attempt = newest()
    assert (attempt.cause, attempt.state) == ("unsaved", "failed")
    assert attempt.reason.startswith("Stopped on request with exit code 0 before it was done")
    assert "vigil_report.finished()" in attempt.decision
    assert Attempt.objects.count() == 1


def test_what_the_guards_found_is_reported_as_a_sentence(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    what = "at step 80 the replica check finds rank 2 wrong (model.head)"
    failure = {**EXCEPTION, "error": f"NumericsError: numerics.corruption: {what}"}
    launched(newest(), exit_code=1, cause="failed", first_failure=failure)
    scheduler.update_job("101", state="failed", exit_code=1)
    tick()
    attempt = newest()
    assert (attempt.cause, attempt.reason) == ("corruption", f"A{what[1:]}.")
    assert "the faulty node is unknown." in attempt.decision
    assert "Exclude that rank's node" in attempt.decision
    assert Attempt.objects.count() == 1


CORRUPT = {**EXCEPTION, "error": "NumericsError: numerics.corruption: at step 30 loss nan, but finite when done again"}


def _corrupt(
    job: Job, scheduler: ScriptedScheduler, scheduler_id: str, *, nodes: tuple[str, ...], **found: Any
) -> None:
    """End the newest attempt with what its trainer found."""
    scheduler.update_job(scheduler_id, state="running", nodes=nodes)
    data = {"step": 30, "check": "redo", "ranks": [1], "intact": True, "clean_step": 0, **found}
    Event.objects.create(attempt=newest(), time=timezone.now(), kind="guard.corruption", rank=0, data=data)
    launched(newest(), exit_code=1, cause="failed", first_failure=CORRUPT)
    scheduler.update_job(scheduler_id, state="failed", exit_code=1, nodes=nodes)


def _nodes(scheduler: ScriptedScheduler, *names: str, **more: Any) -> None:
    """Set the cluster's nodes, now and at the next poll."""
    scheduler.machines = [replace(DGX_01, name=name, **{"plays_many": False, **more}) for name in names]
    Node.objects.all().delete()
    Node.objects.bulk_create(Node(name=name, **more) for name in names)


def test_broken_hardware_is_gone_round(job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]) -> None:
    """The node that was named is in no later attempt of the day, on whatever scheduler understands that."""
    _nodes(scheduler, *(f"dgx{number:02}" for number in range(1, 21)))
    Job.objects.update(spec={**job.spec, "restart": {"max_restarts": 9, "in_place": 0}})
    a_checkpoint(job, 25)
    _corrupt(job, scheduler, "101", nodes=("dgx01", "dgx02"), node="dgx02")
    tick()
    assert Attempt.objects.get(number=1).decision == (
        "Results that must be identical differ: some hardware is faulty. "
        "Restarted from step 25 without dgx02 as attempt 2. Restart 1 of 9."
    )
    assert [submission.excluded_nodes for submission in scheduler.submissions] == [(), ("dgx02",)]
    root = rundir.path_of(Job.objects.get().directory)
    assert "#SBATCH --exclude=dgx02\n" in (root / "portal" / "batch.sh").read_text()
    scheduler.update_job("102", state="node_fail", nodes=("dgx01", "dgx03"))
    tick()
    assert scheduler.submissions[2].excluded_nodes == ("dgx02",), "it lasts"
    Attempt.objects.filter(number=1).update(ended_at=timezone.now() - timedelta(hours=25))
    scheduler.update_job("103", state="preempted")
    tick()
    assert scheduler.submissions[3].excluded_nodes == (), "for a day"


def test_of_a_small_partition_a_single_node_is_excluded(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    _nodes(scheduler, "dgx01", "dgx02", "dgx03")
    Job.objects.update(spec={**job.spec, "restart": {"max_restarts": 9, "in_place": 0}})
    for number, node in enumerate(("dgx02", "dgx03"), 1):
        a_checkpoint(job, number, attempt=newest())
        _corrupt(job, scheduler, str(100 + number), nodes=("dgx01", node), node=node)
        tick()
    assert [submission.excluded_nodes for submission in scheduler.submissions] == [(), ("dgx02",), ("dgx03",)]


def test_weights_that_may_be_wrong_are_not_gone_on_from(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    _nodes(scheduler, "dgx01", "dgx02", "dgx03")
    for step in (20, 60):
        a_checkpoint(job, step, attempt=newest())
    _corrupt(job, scheduler, "101", nodes=("dgx01",), node="dgx01", check="replica", intact=False, clean_step=40)
    tick()
    assert newest().resume_from == Checkpoint.objects.get(step=20)
    hint = json.loads((rundir.path_of(Job.objects.get().directory) / "portal" / "attempt.json").read_text())
    assert hint == {"number": 2, "resume": "step-20"}


@pytest.mark.parametrize(
    ("found", "facts", "text"),
    [
        ({"node": "dgx02"}, {}, "Not restarted: it failed on dgx02, and too few nodes are left without it."),
        (
            {"node": "dgx02"},
            {"plays_many": True},
            "Not restarted: it failed on dgx02, and too few nodes are left without it.",
        ),
        ({"node": None, "intact": False}, {}, "the faulty node is unknown. Exclude that rank's node"),
        ({"node": "dgx02", "intact": False}, {}, "it has no checkpoint from before the last clean check."),
        ({"node": "elsewhere", "intact": False}, {}, "the faulty node is unknown."),
    ],
    ids=["the only node", "the only machine", "not told", "nothing before", "another's node"],
)
def test_what_cannot_be_gone_round_is_a_persons_move(
    job: Job,
    scheduler: ScriptedScheduler,
    tick: Callable[[], bool],
    found: dict[str, Any],
    facts: dict[str, Any],
    text: str,
) -> None:
    _nodes(scheduler, "dgx02", **facts)
    _corrupt(job, scheduler, "101", nodes=("dgx02",), **found)
    tick()
    assert text in newest().decision
    assert Attempt.objects.count() == 1


def test_a_passing_fault_that_nobody_can_place_is_tried_again_once(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    _nodes(scheduler, "dgx01", "dgx02", "dgx03")
    _corrupt(job, scheduler, "101", nodes=("dgx01", "dgx02"), node=None, ranks=[])
    tick()
    assert "The faulty node is unknown. Restarted from the beginning as attempt 2." in (
        Attempt.objects.get(number=1).decision
    )
    assert scheduler.submissions[1].excluded_nodes == ()
    _corrupt(job, scheduler, "102", nodes=("dgx01", "dgx02"), node=None, ranks=[])
    tick()
    assert "Failed twice for the same reason without saving a checkpoint; not restarted." in newest().decision
    assert Attempt.objects.count() == 2


DIVERGED = {**EXCEPTION, "error": "NumericsError: numerics.divergence: at step 500 the smoothed loss is 9"}


def test_what_has_diverged_goes_back_with_half_the_learning_rate(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    Job.objects.update(spec={**job.spec, "restart": {"max_restarts": 9, "in_place": 0}})
    rate = job.spec["run"]["learning_rate"]
    portal = rundir.path_of(Job.objects.get().directory) / "portal"
    for number, (scheduler_id, factor) in enumerate((("101", 2), ("102", 4)), 1):
        scheduler.update_job(scheduler_id, state="running")
        launched(newest(), exit_code=1, cause="failed", first_failure=DIVERGED)
        for step in (100, 300, 400):
            a_checkpoint(job, step + number, attempt=newest())
        Attempt.objects.filter(number=number).update(step=505)
        scheduler.update_job(scheduler_id, state="failed", exit_code=1)
        tick()
        ended = Attempt.objects.get(number=number)
        start = 300 + number
        assert (ended.cause, ended.decision) == (
            "diverged",
            f"Loss or gradient diverged. Restarted from step {start} with half the learning rate as attempt "
            f"{number + 1}. Restart {number} of 9.",
        )
        assert newest().resume_from == Checkpoint.objects.get(step=start)
        assert tomllib.loads((portal / "run.toml").read_text())["run"]["learning_rate"] == rate / factor
        hint = json.loads((portal / "attempt.json").read_text())
        assert hint == {"number": number + 1, "resume": f"step-{start}"}
    scheduler.update_job("103", state="node_fail")
    tick()
    assert tomllib.loads((portal / "run.toml").read_text())["run"]["learning_rate"] == rate / 4
    # Attempt 3 saved nothing, so the checkpoint that it was to avoid is still the newest.
    assert json.loads((portal / "attempt.json").read_text()) == {"number": 4, "resume": "step-302"}


def test_what_diverged_early_is_not_restarted(job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]) -> None:
    launched(newest(), exit_code=1, cause="failed", first_failure=DIVERGED)
    a_checkpoint(job, 400)
    Attempt.objects.update(step=500)
    scheduler.update_job("101", state="failed", exit_code=1)
    tick()
    assert "no checkpoint that is at least 200 steps older" in newest().decision
    assert Attempt.objects.count() == 1


def test_exit_75_without_a_requeue_goes_on_and_counts_as_nothing(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    for number in (1, 2, 3):
        a_checkpoint(job, 100 * number, attempt=newest())
        scheduler.update_job(f"10{number}", state="failed", exit_code=75)
        tick()
    assert Attempt.objects.count() == 4
    assert newest().state == "pending"


def test_one_at_a_time(scheduler: ScriptedScheduler) -> None:
    claim = lease.take("follow")
    assert claim is not None
    assert not follow.tick(scheduler)
    claim.release()
    assert follow.tick(scheduler)


def test_a_holder_that_slept_past_its_lease_writes_nothing(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped between the poll and the write: by then somebody else has the lease."""
    scheduler.update_job("101", state="running")
    status = scheduler.status

    def slow(ids: list[str]) -> Any:
        Lease.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
        assert lease.take("follow", holder="another") is not None
        return status(ids)

    monkeypatch.setattr(scheduler, "status", slow)
    assert tick()
    assert newest().state == "pending"
    assert Lease.objects.get().holder == "another"


class TestDeactivated:
    """A person who has left: what runs goes on, and nothing more starts in their name."""

    @pytest.fixture(autouse=True)
    def _left(self, oskar: User, job: Job) -> None:
        User.objects.filter(pk=oskar.pk).update(is_active=False)

    def test_what_runs_is_followed_and_not_restarted(
        self, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
    ) -> None:
        scheduler.update_job("101", state="running")
        tick()
        assert Attempt.objects.get().state == "running"
        scheduler.update_job("101", state="node_fail")
        tick()
        attempt = Attempt.objects.get()
        assert attempt.decision == ("A node failed. Not restarted: the account of oskar is deactivated.")
        assert len(scheduler.submissions) == 1

    def test_what_waits_is_not_handed_over(
        self, oskar: User, scheduler: ScriptedScheduler, tick: Callable[[], bool]
    ) -> None:
        oskar.is_active = True  # until just now
        created, _ = submit_spec(oskar)
        tick()
        attempt = Attempt.objects.get(job=created)
        assert (attempt.state, attempt.cause) == ("failed", "rejected")
        assert attempt.reason.startswith("The account of oskar is deactivated, so nothing is started in that name")
        assert len(scheduler.submissions) == 1
