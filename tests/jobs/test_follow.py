"""The follower, tick by tick, with a scheduler that says what the test wants."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from jobs import ending, follow, lease, reports, rundir
from jobs.models import Attempt, Checkpoint, Job, Stream
from jobs.restart import Decision
from jobs.spec import JobSpec, write_toml
from jobs.submit import cancel, submit
from nodes.models import Node
from nodes.schedulers.base import SchedulerError
from portal.models import Lease, User
from tests.jobs.schedulers import Told
from tests.lab import a_project, person

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.VIGIL_RUNS = tmp_path / "runs"
    monkeypatch.setattr(reports, "sweep", lambda attempt, root, until: None)


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def oskar() -> User:
    return person("oskar", a_project())


@pytest.fixture
def tick(told: Told, caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], bool]]:
    """A round of the follower; what it lived through but should not have met fails the test."""
    yield lambda: follow.tick(told)
    assert not [record.getMessage() for record in caplog.records if record.exc_info]


@pytest.fixture
def job(oskar: User, tick: Callable[[], bool]) -> Job:
    """A job that the scheduler has, pending."""
    spec = JobSpec.parse({"name": "gpt", "restart": {"max_restarts": 1}})
    made, _ = submit(oskar, spec, spec_toml=write_toml(spec))
    tick()
    return made


def newest() -> Attempt:
    return Attempt.objects.select_related("job").latest("number")


def launched(attempt: Attempt, **result: Any) -> Path:
    """What a launcher leaves behind: its folder, and its last word if there is one."""
    folder = rundir.path_of(attempt.job.directory) / "job" / f"attempt-{attempt.number}"
    for part in ("spool", "logs"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    owner = {"scheduler_id": attempt.scheduler_id, "restart_count": attempt.scheduler_restart_count}
    (folder / "owner.json").write_text(json.dumps(owner))
    if result:
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def committed(attempt: Attempt, step: int) -> Checkpoint:
    values = {"generation": 1, "name": f"step-{step}", "created_at": timezone.now()}
    return Checkpoint.objects.create(job=attempt.job, attempt=attempt, step=step, **values)


EXCEPTION = {"rank": 1, "incarnation": 0, "kind": "exception", "error": "ValueError: shapes differ"}


def test_from_submission_to_close(job: Job, told: Told, tick: Callable[[], bool]) -> None:
    assert newest().scheduler_id == "101"
    told.say("101", state="pending", reason="Resources")
    tick()
    assert (newest().state, newest().reason) == ("pending", "Resources")
    started = timezone.now().timestamp()
    told.say("101", state="running", reason="", nodes=("dgx-01",), started_at=started)
    launched(newest())
    tick()
    attempt = newest()
    assert (attempt.state, attempt.nodes, attempt.directory) == ("running", ["dgx-01"], "attempt-1")
    assert attempt.started_at is not None
    version = attempt.version
    tick()
    assert newest().version == version  # nothing changed, nothing is said
    told.say("101", state="completed", exit_code=0, ended_at=started + 5)
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
    job: Job, told: Told, tick: Callable[[], bool]
) -> None:
    told.say("101", state="running")
    launched(newest())
    committed(newest(), 100)
    tick()
    told.say("101", state="node_fail")
    tick()
    first, second = Attempt.objects.order_by("number")
    assert (first.state, first.cause) == ("node_fail", "node_fail")
    assert "from step 100 as attempt 2. Restart 1 of 1." in first.decision
    assert (second.origin, second.scheduler_id) == ("restarted", "102")
    assert second.resume_from is not None
    assert second.resume_from.step == 100
    assert Job.objects.get().latest == second
    committed(second, 200)
    told.say("102", state="node_fail")
    tick()
    second.refresh_from_db()
    assert "Its 1 restarts are used up" in second.decision
    assert Attempt.objects.count() == 2


def test_the_same_cause_twice_with_no_checkpoint_between_stops(
    oskar: User, job: Job, told: Told, tick: Callable[[], bool]
) -> None:
    Job.objects.update(spec={**job.spec, "restart": {"max_restarts": 9, "in_place": 0}})
    for scheduler_id in ("101", "102"):
        told.say(scheduler_id, state="node_fail")
        tick()
    assert "struck twice" in newest().decision
    assert Attempt.objects.count() == 2


def test_an_exception_is_not_repeated_and_named(job: Job, told: Told, tick: Callable[[], bool]) -> None:
    launched(newest(), exit_code=1, cause="failed", first_failure=EXCEPTION)
    told.say("101", state="failed", exit_code=1)
    tick()
    attempt = newest()
    assert (attempt.cause, attempt.reason) == ("exception", "Rank 1: ValueError: shapes differ")
    assert attempt.failure["rank"] == 1
    assert "Your move" in attempt.decision
    assert Attempt.objects.count() == 1


def test_a_requeue_is_an_attempt_of_its_own(job: Job, told: Told, tick: Callable[[], bool]) -> None:
    told.say("101", state="running")
    launched(newest(), exit_code=75, cause="stopped", first_failure=None)
    tick()
    told.say("101", state="pending", restart_count=1)
    tick()
    first, second = Attempt.objects.order_by("number")
    assert (first.state, first.cause) == ("requeued", "stopped")
    assert (second.origin, second.scheduler_id, second.scheduler_restart_count) == ("requeued", "101", 1)
    assert len(told.submissions) == 1
    root = rundir.path_of(second.job.directory)
    token = json.loads((root / "portal" / "token").read_text())
    assert (token["attempt"], token["restart_count"], token["number"]) == (second.pk, 1, 2)
    launched(second)
    told.say("101", state="completed", restart_count=1, exit_code=0)
    tick()
    second.refresh_from_db()
    assert (second.state, second.directory) == ("completed", "attempt-2")


def test_requeues_that_no_tick_saw_get_their_rows(job: Job, told: Told, tick: Callable[[], bool]) -> None:
    told.say("101", state="completed", restart_count=3, exit_code=0)
    tick()
    states = [(attempt.state, attempt.scheduler_restart_count) for attempt in Attempt.objects.order_by("number")]
    assert states == [("requeued", 0), ("requeued", 1), ("requeued", 2), ("completed", 3)]


def test_exit_75_without_a_requeue_goes_on_and_counts_as_nothing(
    job: Job, told: Told, tick: Callable[[], bool]
) -> None:
    for number in (1, 2, 3):
        committed(newest(), 100 * number)
        told.say(f"10{number}", state="failed", exit_code=75)
        tick()
    assert Attempt.objects.count() == 4
    assert newest().state == "pending"


class TestCancel:
    def test_term_then_grace_then_kill(self, oskar: User, job: Job, told: Told, tick: Callable[[], bool]) -> None:
        told.say("101", state="running")
        tick()
        cancel(oskar, job)
        tick()
        tick()
        assert told.signals == [("101", "TERM")]
        assert (rundir.path_of(newest().job.directory) / "portal" / "cancelled").exists()
        assert not told.cancelled
        Attempt.objects.update(cancel_signalled_at=timezone.now() - timedelta(seconds=46))
        tick()
        tick()
        assert told.cancelled == ["101"]
        told.say("101", state="cancelled", signal=9)
        tick()
        attempt = newest()
        assert (attempt.state, attempt.reason) == ("cancelled", "Cancelled by oskar.")
        assert Attempt.objects.count() == 1

    def test_one_that_stops_in_time_is_cancelled_too(
        self, oskar: User, job: Job, told: Told, tick: Callable[[], bool]
    ) -> None:
        told.say("101", state="running")
        tick()
        cancel(oskar, job)
        tick()
        told.say("101", state="failed", exit_code=75)
        tick()
        assert (newest().state, newest().exit_code) == ("cancelled", 75)
        assert "Resume goes on" in newest().decision

    def test_one_that_waits_leaves_the_queue(self, oskar: User, job: Job, told: Told, tick: Callable[[], bool]) -> None:
        cancel(oskar, job)
        tick()
        assert told.cancelled == ["101"]
        assert not told.signals

    def test_a_requeue_in_between_is_cancelled_too(
        self, oskar: User, job: Job, told: Told, tick: Callable[[], bool]
    ) -> None:
        told.say("101", state="running")
        tick()
        cancel(oskar, job)
        told.say("101", state="running", restart_count=1)
        tick()
        assert newest().number == 2
        assert told.signals == [("101", "TERM")]

    def test_asked_for_while_a_requeue_is_being_noticed(
        self, oskar: User, job: Job, told: Told, tick: Callable[[], bool]
    ) -> None:
        """The wish comes between the read of the rows and the scheduler's answer."""
        told.say("101", state="running")
        tick()
        told.say("101", state="running", restart_count=1)
        told.meanwhile = lambda: cancel(oskar, job)
        tick()
        assert (newest().number, newest().cancel_asked_by) == (2, oskar)
        assert told.signals == [("101", "TERM")]

    def test_asked_for_while_the_restart_is_being_decided(
        self, oskar: User, job: Job, told: Told, tick: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told.say("101", state="node_fail")
        decide = ending.decide

        def slowly(attempt: Attempt, cause: str) -> Decision:
            decision = decide(attempt, cause)
            if newest().cancel_asked_at is None:
                cancel(oskar, job)
            return decision

        monkeypatch.setattr(ending, "decide", slowly)
        tick()
        tick()
        assert Attempt.objects.count() == 1
        assert "does not start it anew" in newest().decision

    def test_a_restart_that_was_due_is_off(
        self, oskar: User, job: Job, told: Told, tick: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told.say("101", state="node_fail")
        with monkeypatch.context() as patch:
            patch.setattr(follow.Tick, "settle", lambda self: None)
            tick()
        cancel(oskar, job)
        tick()
        assert Attempt.objects.count() == 1
        assert "does not start it anew" in newest().decision


class TestFaults:
    def test_a_scheduler_that_does_not_answer_changes_nothing(
        self, job: Job, told: Told, tick: Callable[[], bool]
    ) -> None:
        before = Attempt.objects.values().get()
        told.broken = SchedulerError("no answer within 10 s")
        assert tick()
        assert Attempt.objects.values().get() == before

    def test_a_job_unknown_to_the_scheduler_is_lost_after_a_while(
        self, job: Job, told: Told, tick: Callable[[], bool]
    ) -> None:
        told.jobs.clear()
        tick()
        assert newest().state == "pending"
        Attempt.objects.update(unknown_since=timezone.now() - timedelta(minutes=2))
        tick()
        first = Attempt.objects.get(number=1)
        assert (first.state, first.reason) == ("node_fail", "The scheduler does not know its job 101 any more.")
        assert told.cancelled == ["101"]  # should it live on unseen: no second one beside it

    def test_one_answer_without_a_job_means_nothing(self, job: Job, told: Told, tick: Callable[[], bool]) -> None:
        """However long it has been running, and however often that happens."""
        told.say("101", state="running")
        Attempt.objects.update(submitted_at=timezone.now() - timedelta(hours=3))
        for _ in range(2):
            known = told.jobs.pop("101")
            tick()
            assert newest().unknown_since is not None
            told.jobs["101"] = known
            tick()
            assert (newest().number, newest().state, newest().unknown_since) == (1, "running", None)
        assert not told.cancelled

    def test_what_a_job_wrote_is_not_believed(self, job: Job, told: Told, tick: Callable[[], bool]) -> None:
        folder = launched(newest())
        (folder / "result.json").symlink_to("/etc/passwd")
        (folder.parent / "attempt-2").symlink_to(folder)
        told.say("101", state="failed", exit_code=1)
        tick()
        assert (newest().cause, newest().failure, newest().directory) == ("failed", {}, "attempt-1")

    def test_odd_results(self, job: Job, told: Told, tick: Callable[[], bool]) -> None:
        failure = {"rank": "x", "kind": ["exception"], "error": "a\0b" * 5000, "exit_code": 10**30}
        launched(newest(), exit_code=1, first_failure=failure)
        told.say("101", state="failed", exit_code=1)
        tick()
        assert newest().cause == "failed"
        assert set(newest().failure) == {"error"}
        assert len(newest().failure["error"]) == 2000

    def test_it_stays_open_while_a_stream_has_not_ended(self, job: Job, told: Told, tick: Callable[[], bool]) -> None:
        folder = launched(newest())
        (folder / "spool" / "0.0.abcdef0123456789.jsonl").write_text("")
        told.say("101", state="completed", exit_code=0)
        tick()
        assert newest().closed_at is None
        stream = Stream.objects.create(attempt=newest(), uid="abcdef0123456789", incarnation=0, rank=0)
        tick()
        assert newest().closed_at is None
        Stream.objects.filter(pk=stream.pk).update(ended=True)
        tick()
        assert newest().closed_at is not None

    def test_ten_minutes_without_growth_close_it(self, job: Job, told: Told, tick: Callable[[], bool]) -> None:
        (launched(newest()) / "spool" / "0.0.abcdef0123456789.jsonl").write_text("")
        told.say("101", state="completed", exit_code=0)
        tick()
        Attempt.objects.update(ended_at=timezone.now() - timedelta(minutes=11), last_report_at=timezone.now())
        tick()
        assert newest().closed_at is None  # it grew a moment ago
        Attempt.objects.update(last_report_at=timezone.now() - timedelta(minutes=11))
        tick()
        assert newest().closed_at is not None

    def test_one_broken_run_directory_is_its_own_affair(
        self, oskar: User, job: Job, told: Told, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The other jobs still get their tokens and folders."""
        spec = JobSpec.parse({"name": "other"})
        other, _ = submit(oskar, spec, spec_toml=write_toml(spec))
        follow.tick(told)
        for scheduler_id in ("101", "102"):
            told.say(scheduler_id, state="running")
        Attempt.objects.update(token_digest="")
        job.refresh_from_db()
        shutil.rmtree(rundir.path_of(job.directory))
        launched(Attempt.objects.select_related("job").get(job=other))
        follow.tick(told)
        assert other.attempts.get().token_digest
        assert other.attempts.get().directory == "attempt-1"
        assert not job.attempts.get().token_digest
        assert "FileNotFoundError" in caplog.text
        caplog.clear()  # the one that was to be expected

    def test_spools_that_take_long_hold_up_nobody(
        self, oskar: User, job: Job, told: Told, tick: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Neither another job's submission, nor for ever what follows; and it is not closed before they are read."""
        launched(newest())
        told.say("101", state="node_fail")
        spec = JobSpec.parse({"name": "other"})
        other, _ = submit(oskar, spec, spec_toml=write_toml(spec))
        monkeypatch.setattr(follow, "SWEEP_S", 0.0)
        tick()
        assert other.attempts.get().scheduler_id == "102"
        first = job.attempts.get()
        assert (first.state, first.decided_at, first.swept_at) == ("node_fail", None, None)
        Attempt.objects.filter(pk=first.pk).update(sweep_began_at=timezone.now() - timedelta(seconds=21))
        tick()
        first, second = job.attempts.order_by("number")
        assert (second.origin, second.scheduler_id) == ("restarted", "103")
        Attempt.objects.filter(pk=first.pk).update(ended_at=timezone.now() - timedelta(minutes=11))
        tick()
        first.refresh_from_db()
        assert first.closed_at is None
        monkeypatch.setattr(follow, "SWEEP_S", 1.0)
        tick()
        first.refresh_from_db()
        assert first.closed_at is not None


class TestLease:
    def test_one_at_a_time(self, told: Told) -> None:
        held = lease.take("follow")
        assert held is not None
        assert not follow.tick(told)
        held.release()
        assert follow.tick(told)

    def test_a_holder_that_slept_past_its_lease_writes_nothing(
        self, job: Job, told: Told, tick: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Stopped between the poll and the write: by then somebody else has the lease."""
        told.say("101", state="running")
        status = told.status

        def slow(ids: list[str]) -> Any:
            Lease.objects.update(expires_at=timezone.now() - timedelta(seconds=1))
            assert lease.take("follow", holder="another") is not None
            return status(ids)

        monkeypatch.setattr(told, "status", slow)
        assert tick()
        assert newest().state == "pending"
        assert Lease.objects.get().holder == "another"

    def test_the_fence_rises(self) -> None:
        first = lease.take("x")
        assert first is not None
        first.release()
        second = lease.take("x")
        assert second is not None
        assert second.fence == first.fence + 1
        with pytest.raises(lease.LeaseLost), first.writing():
            pass
        with second.writing():
            pass
