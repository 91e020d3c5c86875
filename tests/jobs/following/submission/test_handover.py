"""Test handing attempts over to the scheduler exactly once, despite stalls, failures and cancels meanwhile."""

from __future__ import annotations

import errno
import json
import os
import pwd
import stat
import tomllib
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from jobs.disk import rundir, sharing, upload
from jobs.following.submission import handover
from jobs.models import Attempt, Checkpoint, Job
from jobs.submitting.submit import cancel, resume
from nodes.schedulers.base import UNKNOWN, SchedulerError, Submission
from portal.models import Project, User
from tests.jobs.schedulers import ScriptedScheduler
from tests.jobs.submissions import ENTRIES, coded, its_code, packed, spec_of, submit_spec
from tests.lab import a_project, sysadmin

pytestmark = pytest.mark.django_db


def newest() -> Attempt:
    return Attempt.objects.latest("number")


def stalled(job: Job) -> None:
    """Move the claim of the job's attempt further back than any request may take."""
    earlier = timezone.now() - timedelta(seconds=40)
    Attempt.objects.filter(job=job, ended_at=None, scheduler_id="").update(submitting_at=earlier)


def overtaken(
    monkeypatch: pytest.MonkeyPatch, job: Job, scheduler: ScriptedScheduler, *, error: OSError | None = None
) -> None:
    """Let a second worker hand the attempt over while one writes the run directory."""
    prepare = handover.prepare

    def slow(attempt: Attempt) -> Path:
        monkeypatch.setattr(handover, "prepare", prepare)
        stalled(job)
        handover.hand_over(attempt.pk, scheduler)
        if error is not None:
            raise error
        return prepare(attempt)

    monkeypatch.setattr(handover, "prepare", slow)


def test_writes_the_run_directory_and_submits_once(oskar: User, scheduler: ScriptedScheduler) -> None:
    job, _ = submit_spec(oskar)
    assert job.latest_id is not None
    handover.hand_over(job.latest_id, scheduler)
    handover.hand_over(job.latest_id, scheduler)
    attempt = Attempt.objects.select_related("job").get(pk=job.latest_id)
    assert (len(scheduler.submissions), attempt.scheduler_id) == (1, "101")
    root = rundir.path_of(attempt.job.directory)
    assert root.parent.name == "default"
    assert root.name.startswith(f"{job.pk}-")
    portal = root / "portal"
    assert (portal / "spec.toml").read_text() == job.spec_toml
    assert json.loads((portal / "attempt.json").read_text()) == {"number": 1, "resume": None}
    token = json.loads((portal / "token").read_text())
    assert (token["scheduler_id"], token["restart_count"], token["attempt"]) == ("101", 0, attempt.pk)
    assert stat.S_IMODE((portal / "token").stat().st_mode) == 0o600
    for path in (root, *root.rglob("*")):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o007, path
    assert stat.S_IMODE((root / "job").stat().st_mode) == 0o2770
    batch = (portal / "batch.sh").read_text()
    assert token["token"] not in batch
    assert "#SBATCH --signal=B:USR1@30" in batch
    submission = scheduler.submissions[0]
    assert (submission.key, submission.time_limit_s, submission.grace_s, submission.cpus_per_node) == (
        attempt.key,
        3600,
        30,
        1,
    )


def test_a_request_whose_answer_was_lost_is_not_repeated(oskar: User, scheduler: ScriptedScheduler) -> None:
    job, _ = submit_spec(oskar)
    assert job.latest_id is not None
    scheduler.loses_answers = True
    handover.hand_over(job.latest_id, scheduler)
    scheduler.loses_answers = False
    assert handover.due() == []  # not before any request must have ended
    handover.hand_over(job.latest_id, scheduler)
    assert len(scheduler.submissions) == 1
    Attempt.objects.update(submitting_at=timezone.now() - timedelta(seconds=31))
    assert handover.due() == [job.latest_id]
    handover.hand_over(job.latest_id, scheduler)
    assert len(scheduler.submissions) == 1
    assert Attempt.objects.get().scheduler_id == "101"


def test_a_refusal_ends_the_attempt_with_its_words(oskar: User, scheduler: ScriptedScheduler) -> None:
    job, _ = submit_spec(oskar)
    assert job.latest_id is not None
    scheduler.broken = SchedulerError("Account siskin may not use partition h100.", permanent=True)
    handover.hand_over(job.latest_id, scheduler)
    attempt = Attempt.objects.get()
    assert (attempt.state, attempt.cause, attempt.reason) == ("failed", "rejected", str(scheduler.broken))


def test_no_time_to_stop_is_refused(oskar: User, scheduler: ScriptedScheduler) -> None:
    job, _ = submit_spec(oskar, spec_of(resources={"time_limit": "00:02:00"}))
    assert job.latest is not None
    now = timezone.now()
    Checkpoint.objects.create(job=job, attempt=job.latest, step=1, generation=1, seconds=50, created_at=now)
    handover.hand_over(job.latest.pk, scheduler)
    assert not scheduler.submissions
    assert "takes 130 s" in Attempt.objects.get().reason


def test_a_silent_scheduler_is_tried_again(oskar: User, scheduler: ScriptedScheduler) -> None:
    job, _ = submit_spec(oskar)
    assert job.latest_id is not None
    scheduler.broken = SchedulerError("Slurm did not answer for 10 s.")
    handover.hand_over(job.latest_id, scheduler)
    attempt = Attempt.objects.get()
    assert (attempt.state, attempt.ended_at) == ("pending", None)
    assert "did not answer" in attempt.reason


def test_a_full_disk_is_waited_for(oskar: User, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    """At three in the morning nobody is there to resume a job that was refused for that."""
    job, _ = submit_spec(oskar)
    with monkeypatch.context() as full:
        full.setattr(handover, "prepare", lambda attempt: (_ for _ in ()).throw(OSError(errno.ENOSPC, "disk full")))
        handover.hand_over(newest().pk, scheduler)
    assert (newest().state, newest().ended_at) == ("pending", None)
    assert "disk full" in newest().reason
    stalled(job)
    handover.hand_over(newest().pk, scheduler)
    assert newest().scheduler_id == "101"


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_an_empty_mount_point_is_waited_for(
    oskar: User, scheduler: ScriptedScheduler, runs: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """An empty folder replaces the file system: a new job may not start, and an older job lacks its run directory."""
    job, _ = submit_spec(oskar)

    def refuse(*about: object, **more: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as closed:
        closed.setattr(Path, "mkdir", refuse)
        handover.hand_over(newest().pk, scheduler)
    assert (newest().ended_at, newest().scheduler_id) == (None, "")
    Job.objects.filter(pk=job.pk).update(directory="default/1-aaaaaa")
    stalled(job)
    handover.hand_over(newest().pk, scheduler)
    assert (newest().ended_at, newest().scheduler_id) == (None, "")
    assert "Mount the file system of VIGIL_RUNS" in newest().reason


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder away")
def test_run_directories_are_nobody_else_s(oskar: User, scheduler: ScriptedScheduler, runs: Path) -> None:
    """If the folder does not exist, anybody with write access to its parent could create it."""
    submit_spec(oskar)
    os.chown(runs, 65_534, -1)
    handover.hand_over(newest().pk, scheduler)
    assert (newest().ended_at, newest().scheduler_id) == (None, "")
    assert "VIGIL_RUNS belongs to another user" in newest().reason
    assert list(runs.iterdir()) == []


def test_run_directories_that_are_away_are_waited_for(oskar: User, scheduler: ScriptedScheduler, runs: Path) -> None:
    """A file system that is not mounted: its folder is not made on the disk below."""
    job, _ = submit_spec(oskar)
    runs.rmdir()
    handover.hand_over(newest().pk, scheduler)
    assert (newest().state, newest().ended_at) == ("pending", None)
    assert f"VIGIL_RUNS is missing: mount its file system, or make the folder: '{runs}'" in newest().reason
    assert not runs.exists()
    runs.mkdir()
    stalled(job)
    handover.hand_over(newest().pk, scheduler)
    assert newest().scheduler_id == "101"


def test_the_run_directory_reports_who_it_cannot_be_shared_with(
    oskar: User, scheduler: ScriptedScheduler, settings: Any
) -> None:
    submit_spec(oskar)
    settings.VIGIL_LOCAL_USER = "nobody-of-this-name"
    handover.hand_over(newest().pk, scheduler)
    assert (newest().state, newest().cause) == ("failed", "rejected")
    assert "has no Unix user nobody-of-this-name. Give it" in newest().reason
    assert not scheduler.submissions


@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts jobs as somebody else")
def test_the_run_directory_is_shared_with_the_jobs_user(
    oskar: User, scheduler: ScriptedScheduler, settings: Any
) -> None:
    submit_spec(oskar)
    settings.VIGIL_LOCAL_USER = "nobody"
    handover.hand_over(newest().pk, scheduler)
    run, uid = rundir.path_of(newest().job.directory), pwd.getpwnam("nobody").pw_uid
    acls = {name: sharing.parse(os.getxattr(run / name, sharing.ACCESS)) for name in ("", "portal", "job")}
    assert [acl.users[uid] for acl in acls.values()] == [5, 5, 7]
    token = sharing.parse(os.getxattr(run / "portal" / "token", sharing.ACCESS))
    assert (token.owner, dict(token.users), token.mask, token.group, token.other) == (6, {uid: 5}, 4, 0, 0)


@pytest.mark.parametrize("state", ["running", UNKNOWN])
def test_not_while_the_attempt_before_may_be_alive(
    oskar: User, scheduler: ScriptedScheduler, project: Project, state: str
) -> None:
    job, _ = submit_spec(oskar)
    assert job.latest_id is not None
    handover.hand_over(job.latest_id, scheduler)
    scheduler.update_job("101", state=state)
    Attempt.objects.update(ended_at=timezone.now(), decided_at=timezone.now(), state="node_fail")
    following = resume(oskar, job)
    handover.hand_over(following.pk, scheduler)
    assert len(scheduler.submissions) == 1
    scheduler.update_job("101", state="node_fail")
    assert handover.due() == [], "others are due meanwhile"
    stalled(job)
    assert handover.due() == [following.pk]
    handover.hand_over(following.pk, scheduler)
    assert len(scheduler.submissions) == 2


def test_who_wakes_after_a_cancel_leaves_nothing_running(
    oskar: User, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker stalls in its request; a person cancels; a second worker finds no job and ends it; then it arrives."""
    job, _ = submit_spec(oskar)
    submit_now = scheduler.submit

    def slow(submission: Submission) -> str:
        stalled(job)
        cancel(oskar, job)
        handover.hand_over(newest().pk, scheduler)
        return submit_now(submission)

    monkeypatch.setattr(scheduler, "submit", slow)
    handover.hand_over(newest().pk, scheduler)
    assert (newest().state, newest().scheduler_id) == ("cancelled", "")
    assert scheduler.cancelled == ["101"]


def test_a_worker_that_wakes_before_submitting_does_not_submit(
    oskar: User, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, _ = submit_spec(oskar)
    overtaken(monkeypatch, job, scheduler)
    handover.hand_over(newest().pk, scheduler)
    assert len(scheduler.submissions) == 1
    assert (newest().state, newest().scheduler_id) == ("pending", "101")
    assert not scheduler.cancelled


def test_who_fails_late_ends_nothing(
    oskar: User, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second worker has submitted it meanwhile."""
    job, _ = submit_spec(oskar)
    overtaken(monkeypatch, job, scheduler, error=OSError("code: Directory not empty"))
    handover.hand_over(newest().pk, scheduler)
    assert (newest().state, newest().scheduler_id, newest().ended_at) == ("pending", "101", None)
    assert newest().reason == ""


def test_two_submissions_leave_a_single_job(
    oskar: User, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second worker does not find the first worker's job, which is on its way, and submits; both answers come."""
    job, _ = submit_spec(oskar)
    submit_now = scheduler.submit

    def slow(submission: Submission) -> str:
        monkeypatch.setattr(scheduler, "submit", submit_now)
        stalled(job)
        handover.hand_over(newest().pk, scheduler)
        return submit_now(submission)

    monkeypatch.setattr(scheduler, "submit", slow)
    handover.hand_over(newest().pk, scheduler)
    assert newest().scheduler_id == "101"
    assert scheduler.cancelled == ["102"]


@pytest.mark.parametrize("table", ENTRIES)
def test_the_code_lies_in_the_run_directory(scheduler: ScriptedScheduler, table: str) -> None:
    a_project()
    spec = coded(table, directory=".", entry="src/train.py")
    job, _ = submit_spec(sysadmin(), spec, code=packed(src__train_py="print(1)", README="hello"))
    assert job.latest_id is not None
    handover.hand_over(job.latest_id, scheduler)
    job.refresh_from_db()
    code = rundir.path_of(job.directory) / "job" / "code"
    assert (code / "src" / "train.py").read_text() == "print(1)"
    assert not list((rundir.runs_root() / upload.UPLOADS).iterdir())
    text = (rundir.path_of(job.directory) / "portal" / "run.toml").read_text()
    run = tomllib.loads(text)
    assert run[table]["entry"] == "src/train.py"
    assert "directory" not in run[table]
    sent = json.loads((rundir.path_of(job.directory) / "portal" / "code.json").read_text())
    assert (len(sent["digest"]), sent["commit"], sent["dirty"]) == (64, "", False)


@pytest.mark.parametrize("table", ENTRIES)
def test_code_is_retained_for_as_long_as_an_attempt_waits_with_it(scheduler: ScriptedScheduler, table: str) -> None:
    """The job is cancelled before it started, and resumed: the second attempt fetches the code."""
    a_project()
    sam = sysadmin()
    jobs = [submit_spec(sam, coded(table), code=its_code(table))[0] for _ in range(2)]
    for job in jobs:
        cancel(sam, job)
        assert job.latest_id is not None
        handover.hand_over(job.latest_id, scheduler)
    Attempt.objects.update(decided_at=timezone.now())
    waits = resume(sam, jobs[0])
    upload.delete_stale(older_than_s=-1, pending=upload.pending_uploads())
    for attempt in (waits, resume(sam, jobs[1])):
        handover.hand_over(attempt.pk, scheduler)
        attempt.refresh_from_db()
    assert waits.scheduler_id
    assert (attempt.cause, attempt.reason) == (
        "rejected",
        "Its uploaded code is gone: an upload is stored for a day unless a job starts with it."
        " Submit it again, with its code.",
    )
