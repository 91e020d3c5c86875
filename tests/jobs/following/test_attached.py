"""Test attached jobs that were started with sbatch: their owner, and which actions apply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.utils import timezone

from jobs.errors import Conflict, Refused, SpecError
from jobs.following import attached
from jobs.intake import reports, wire
from jobs.listing import visibility
from jobs.models import Attempt, Job, Stray
from jobs.spec import JobSpec
from jobs.submitting import submit
from jobs.submitting.attaching import AttachClaim, attach
from jobs.waiting import pending
from nodes.models import QueuedJob
from nodes.schedulers.base import JobStatus, NodeStatus, SlurmStep
from nodes.schedulers.cluster import PartitionInfo
from nodes.schedulers.cluster import QueuedJobInfo as Queued
from portal.models import Project, User
from tests.jobs.following.launchers import newest
from tests.jobs.schedulers import ScriptedScheduler
from tests.lab import person

pytestmark = pytest.mark.django_db
RUNNING = JobStatus(scheduler_id="77", state="running", user="alice", nodes=("dgx-01",), submitted_at=1_700_000_000.0)
SUBMITTED = datetime.fromtimestamp(1_700_000_000, UTC)
ROW = Queued(
    scheduler_id="77", name="big run!", user="alice", state="running", node_count=2, gpus=8, gpu_type="h100", cpus=16,
    memory_mib=4096, time_limit_s=5400, partition="batch", qos="normal", account="vision", nodes=("dgx-01",),
)  # fmt: skip


@pytest.fixture(autouse=True)
def on_slurm(settings: Any) -> None:
    settings.VIGIL_SCHEDULER = "slurm"


@pytest.fixture
def alice(project: Project) -> User:
    return person("alice", project, slurm_user="alice")


@pytest.fixture
def bob(project: Project) -> User:
    return person("bob", project, slurm_user="bob")


def claim(**changes: Any) -> AttachClaim:
    return AttachClaim(**{"scheduler_id": "77", **changes})


def test_it_is_followed_to_its_end_and_not_restarted(
    alice: User, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    scheduler.jobs["77"], scheduler.queued = RUNNING, [ROW]
    job = attach(alice, claim()).attempt.job
    tick()
    tick()  # the queue has been read in the first
    job, attempt = Job.objects.get(), newest()
    assert (attempt.state, attempt.nodes, attempt.submitted_at) == ("running", ["dgx-01"], SUBMITTED)
    assert (job.name, job.kind, job.directory) == ("big-run", "attached", "")
    assert job.spec["resources"] == {
        "nodes": 2, "gpus_per_node": 4, "gpu_type": "h100", "cpus_per_node": 8, "memory_gib": 2.0,
        "time_limit": "01:30:00", "partition": "batch", "account": "vision", "qos": "normal",
    }  # fmt: skip
    version = attempt.version
    tick()
    assert newest().version == version  # nothing changed, nothing is published
    scheduler.update_job("77", state="failed", exit_code=3)
    tick()
    attempt = newest()
    assert (attempt.state, attempt.cause, attempt.exit_code) == ("failed", "failed", 3)
    assert attempt.decision == "Not restarted: Vigil did not submit it."
    assert attempt.closed_at is not None
    assert (scheduler.submissions, scheduler.cancelled, scheduler.signals) == ([], [], [])


def test_a_second_claim_is_the_same_job(alice: User, scheduler: ScriptedScheduler, tick: Callable[[], bool]) -> None:
    scheduler.jobs["77"] = RUNNING
    first = attach(alice, claim())
    tick()
    again = attach(alice, claim(restart_count=0, name="other"))
    assert (first.created, again.created) == (True, False)
    assert again.attempt == first.attempt


@pytest.mark.parametrize("state", ["pending", "running", "completed"])
def test_nobody_attaches_another_s(
    bob: User, scheduler: ScriptedScheduler, tick: Callable[[], bool], state: str
) -> None:
    scheduler.jobs["77"] = JobStatus(scheduler_id="77", state=state, user="alice", nodes=("dgx-01",), exit_code=0)
    scheduler.stepped = {("77", 0): (SlurmStep(number="0", name="secret", state="completed"),)}
    token_of = attach(bob, claim()).attempt
    tick()
    tick()
    attempt = newest()
    assert (attempt.state, attempt.cause) == ("failed", "rejected")
    assert attempt.reason == "Slurm has no job 77 of yours. `squeue --me` lists them."
    assert (attempt.nodes, attempt.slurm_steps, attempt.started_at) == ([], [], None)
    with pytest.raises(reports.AttemptClosed):
        reports.ingest(token_of.pk, wire.ReportPost([], {}, [], {}))


def test_a_claim_that_slurm_has_not_confirmed_gives_no_sight_of_it(
    bob: User, scheduler: ScriptedScheduler, tick: Callable[[], bool], settings: Any
) -> None:
    settings.VIGIL_QUEUE_VISIBLE = "own"
    job = attach(bob, claim()).attempt.job
    QueuedJob.objects.create(scheduler_id="77", name="secret", user="alice", state="pending", account="hidden")
    assert not visibility.visible_queue(bob).exists()
    assert visibility.jobs_of(bob, ["77"]) == {}
    assert pending.names(bob) == {}
    found = pending.why(bob, job)
    assert (found.why, found.text) == (None, "Waiting for Slurm to confirm the owner.")


def test_the_queue_refuses_at_once(bob: User) -> None:
    QueuedJob.objects.create(scheduler_id="77", name="x", user="alice", state="running")
    with pytest.raises(Refused, match=r"Slurm has no job 77 of yours\."):
        attach(bob, claim())


def test_an_array_is_attached_task_by_task(alice: User) -> None:
    QueuedJob.objects.create(scheduler_id="77", name="x", user="alice", state="pending", tasks=20)
    with pytest.raises(Refused, match=r"77 is an array, .* Name one, such as 77_0\."):
        attach(alice, claim())


def test_a_claim_is_not_cancelled_in_slurm_before_it_is_confirmed(
    bob: User, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    scheduler.jobs["77"] = JobStatus(scheduler_id="77", state="unknown")
    job = attach(bob, claim()).attempt.job
    submit.cancel(bob, job)
    tick()
    assert (scheduler.cancelled, scheduler.signals) == ([], [])
    assert newest().is_unconfirmed


def test_what_slurm_does_not_know_is_refused(
    alice: User, scheduler: ScriptedScheduler, tick: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    attach(alice, claim())
    tick()
    assert newest().is_alive, "one answer without it proves nothing"
    monkeypatch.setattr(attached, "UNCONFIRMED_FOR", timedelta(0))
    tick()
    assert newest().reason.startswith("Slurm has no job 77 of yours.")
    assert scheduler.cancelled == []


def test_jobs_of_vigil_are_not_attached(alice: User, scheduler: ScriptedScheduler, tick: Callable[[], bool]) -> None:
    Stray.objects.create(key="0123456789abcdef", scheduler_id="77")
    scheduler.jobs["77"] = JobStatus(scheduler_id="77", state="running", user="alice", key="0123456789abcdef")
    attach(alice, claim())
    tick()
    assert newest().reason == "77 was submitted by Vigil, which already follows it."
    vigils_job = Job.objects.create(owner=alice, project=Project.objects.get(), name="own", kind="script", spec={})
    Attempt.objects.create(job=vigils_job, number=1, scheduler_id="78", scheduler_user="alice")
    with pytest.raises(Refused, match=f"was submitted by Vigil as #{vigils_job.pk}"):
        attach(alice, claim(scheduler_id="78"))


def test_a_name_like_a_key_is_only_a_name(alice: User, scheduler: ScriptedScheduler, tick: Callable[[], bool]) -> None:
    scheduler.jobs["77"] = JobStatus(scheduler_id="77", state="running", user="alice", key="fedcba9876543210")
    attach(alice, claim())
    tick()
    tick()
    assert (newest().state, newest().reason) == ("running", "")


def test_a_requeue_is_the_next_attempt_with_a_separate_token(
    alice: User, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    scheduler.jobs["77"] = RUNNING
    first = attach(alice, claim(restart_count=0)).attempt
    tick()
    with pytest.raises(Conflict, match="does not know yet"):
        attach(alice, claim(restart_count=1))
    scheduler.update_job("77", restart_count=1, previous_end="node_fail")
    tick()
    second = attach(alice, claim(restart_count=1))
    assert (second.created, second.attempt.number, second.attempt.job) == (False, 2, first.job)
    first.refresh_from_db()
    assert (first.state, second.attempt.origin) == ("node_fail", "requeued")
    with pytest.raises(Conflict, match="that run is over"):
        attach(alice, claim(restart_count=0))


def test_requeued_by_hand_after_its_end_it_goes_on(
    alice: User, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    scheduler.jobs["77"] = RUNNING
    first = attach(alice, claim(restart_count=0)).attempt
    tick()
    scheduler.update_job("77", state="completed", exit_code=0)
    tick()
    scheduler.update_job("77", state="running", restart_count=1)
    second = attach(alice, claim(restart_count=1)).attempt
    tick()
    second.refresh_from_db()
    assert (second.job, second.number, second.state) == (first.job, 2, "running")
    scheduler.update_job("77", state="completed", restart_count=1)
    tick()
    third = attach(alice, claim(restart_count=0))  # a cluster that was reinstalled counts from the beginning
    assert third.created


def test_a_cancel_is_scancel(alice: User, scheduler: ScriptedScheduler, tick: Callable[[], bool]) -> None:
    scheduler.jobs["77"] = RUNNING
    job = attach(alice, claim()).attempt.job
    tick()
    submit.cancel(alice, job)
    tick()
    assert (scheduler.cancelled, scheduler.signals) == (["77"], [])
    scheduler.update_job("77", state="cancelled")
    tick()
    assert (newest().state, newest().reason) == ("cancelled", "Cancelled by alice.")


def test_what_a_scheduler_has_lost_is_not_cancelled(
    alice: User, scheduler: ScriptedScheduler, tick: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.jobs["77"] = RUNNING
    attach(alice, claim())
    tick()
    del scheduler.jobs["77"]
    tick()
    Attempt.objects.update(unknown_since=timezone.now() - timedelta(minutes=2))
    tick()
    assert not newest().is_alive
    assert scheduler.cancelled == []


def test_what_does_not_apply_is_refused_by_name(
    alice: User, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    scheduler.jobs["77"] = JobStatus(scheduler_id="77", state="completed", user="alice", exit_code=0)
    job = attach(alice, claim()).attempt.job
    tick()
    with pytest.raises(Conflict, match=f"sbatch started #{job.pk}, not Vigil"):
        submit.resume(alice, job, step=1)
    with pytest.raises(SpecError, match="vigil attach -- COMMAND"):
        JobSpec.parse({"name": "x", "kind": "attached"})
    submit.delete(alice, job)
    assert not Job.objects.exists()


def test_without_slurm_there_is_nothing_to_attach(alice: User, settings: Any) -> None:
    settings.VIGIL_SCHEDULER = "local"
    with pytest.raises(Refused, match="this portal has no Slurm"):
        attach(alice, claim())


def test_whoever_has_no_slurm_user_owns_no_job_there(project: Project) -> None:
    with pytest.raises(Refused, match="Not attached: eve has no Slurm user"):
        attach(person("eve", project), claim())


def test_the_only_project_is_chosen_or_it_is_named(alice: User, scheduler: ScriptedScheduler) -> None:
    with pytest.raises(SpecError, match='"vision" is not a project of yours. Choose one of default.'):
        attach(alice, claim(project="vision"))
    assert attach(alice, claim(tags=("a", "a"))).attempt.job.project.slug == "default"


def test_why_it_waits_is_explained_without_variants(
    alice: User, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    scheduler.machines = [
        NodeStatus(name="dgx-01", state="idle", cpus=8, gpus=4, gpu_type="h100", partitions=("batch",))
    ]
    scheduler.divided = [PartitionInfo(name="batch", nodes=("dgx-01",), is_default=True)]
    scheduler.jobs["77"] = replace(RUNNING, state="pending", nodes=(), reason="Resources")
    scheduler.queued = [replace(ROW, state="pending", nodes=(), reason="Resources")]
    job = attach(alice, claim()).attempt.job
    assert pending.why(alice, job).why is None, "nothing before Slurm reports its owner"
    tick()
    tick()
    found = pending.why(alice, Job.objects.select_related("latest").get())
    assert found.why is not None
    assert found.why.blocks
    assert found.why.variants == ()
