"""Test submitting to a real Slurm over a connection that loses and delays messages: exactly one job runs, or none."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from jobs.following import follow
from jobs.following.cancellation import strays
from jobs.following.submission import arrays, handover
from jobs.models import Attempt, Job, Stray, Sweep
from jobs.spec import SweepSpec
from jobs.submitting import sweeps
from jobs.submitting.submit import cancel
from nodes.schedulers.slurm.http import SlurmHttp
from nodes.schedulers.slurm.rest import SlurmRest
from nodes.schedulers.slurm.scheduler import Slurm
from nodes.schedulers.slurm.tokens import KeyFileTokens
from portal.models import Project, User
from tests.jobs.submissions import spec_of, submit_spec
from tests.lab import person
from tests.slurm.cluster import Cluster
from tests.slurm.people import ALICE, BOB, PORTAL, People
from tests.slurm.wire import Wire, wire

pytestmark = pytest.mark.django_db


@pytest.fixture
def way(slurm: Cluster) -> Iterator[Wire]:
    with wire(slurm.layout.port_of("slurmrestd")) as created:
        yield created


@pytest.fixture
def scheduler(slurm: Cluster, way: Wire) -> Iterator[Slurm]:
    tokens = KeyFileTokens(slurm.layout.jwt_key)
    http = SlurmHttp(way.url, tokens=tokens, user=PORTAL, timeout_s=5.0)
    yield Slurm(SlurmRest(http), tokens=tokens, user=PORTAL)
    http.close()


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, settings: Any) -> Iterator[Path]:
    """Return run directories whose batch script notes that it ran, and then waits."""
    path = Path(tempfile.mkdtemp(prefix="vigil-runs-"))
    people = People()
    shutil.chown(path, people.alice.uid, people.group)
    path.chmod(0o777)
    settings.VIGIL_RUNS = path

    def prepare(attempt: Attempt) -> Path:
        root = path / "default" / f"{attempt.job_id}-aaaaaa"
        for name in ("portal", "job"):
            (root / name).mkdir(parents=True, exist_ok=True)
        (root / "job").chmod(0o777)
        (root / "portal" / "batch.sh").write_text("#!/bin/bash\ntouch job/ran.$SLURM_JOB_ID\nexec sleep 300\n")
        Job.objects.filter(pk=attempt.job_id).update(directory=f"default/{root.name}")
        attempt.job.directory = f"default/{root.name}"
        return root

    monkeypatch.setattr(handover, "prepare", prepare)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def alice() -> User:
    project = Project.objects.create(slug="default", slurm_account="vision")
    return person("alice", project, slurm_user=ALICE)


@pytest.fixture
def job(alice: User, folder: Path) -> Job:
    return submit_spec(alice, spec_of(name="lost", resources={"time_limit": "00:05:00"}))[0]


def jobs_of(slurm: Cluster, job: Job) -> list[tuple[str, str]]:
    """Return every job that Slurm has of it, and its state."""
    key = job.attempts.get().key
    rows = slurm.run("squeue", "--noheader", "--states=all", "--format=%i %T %j").splitlines()
    return [(found[0], found[1]) for found in (row.split(maxsplit=2) for row in rows) if found[2].endswith(key)]


def ran(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("default/*/job/ran.*"))


def later() -> None:
    """Longer than any request takes."""
    moment = timezone.now() - timedelta(seconds=31)
    Attempt.objects.filter(ended_at=None).update(submitting_at=moment)
    Stray.objects.update(tried_at=moment)


@pytest.fixture
def end(slurm: Cluster, job: Job) -> Iterator[Callable[[], None]]:
    def ending() -> None:
        for scheduler_id, _ in jobs_of(slurm, job):
            slurm.run("scancel", scheduler_id)
        done = {"CANCELLED", "COMPLETED", "FAILED"}
        slurm.wait_for(lambda: {state for _, state in jobs_of(slurm, job)} <= done, "its jobs to end")

    yield ending
    ending()


def test_a_lost_answer_leaves_a_single_job(
    slurm: Cluster, way: Wire, scheduler: Slurm, job: Job, folder: Path, end: Callable[[], None]
) -> None:
    way.cut = True
    follow.tick(scheduler)
    attempt = job.attempts.get()
    assert (attempt.scheduler_id, attempt.ended_at, way.posts) == ("", None, 1)
    assert "broke" in attempt.reason
    slurm.wait_for(lambda: len(ran(folder)) == 1, "the job to run, unknown to us")
    follow.tick(scheduler)
    assert way.posts == 1  # not before any request must have ended
    later()
    follow.tick(scheduler)
    attempt.refresh_from_db()
    ((scheduler_id, state),) = jobs_of(slurm, job)
    assert (attempt.scheduler_id, state, way.posts) == (scheduler_id, "RUNNING", 1)
    assert ran(folder) == [f"ran.{scheduler_id}"]
    follow.tick(scheduler)
    attempt.refresh_from_db()
    assert attempt.state == "running"


def test_another_person_s_job_that_bears_our_key_is_not_taken_for_ours(
    slurm: Cluster, way: Wire, scheduler: Slurm, job: Job, folder: Path, end: Callable[[], None]
) -> None:
    """Keys stand in the queue, for everybody to read."""
    way.cut = True
    follow.tick(scheduler)
    ((ours, _),) = jobs_of(slurm, job)
    slurm.run("scancel", ours)
    key = job.attempts.get().key
    words = [f"--comment=vigil:{key}", f"--job-name=lost.{key}", "--output=/dev/null", "--wrap=sleep 60"]
    slurm.run("sbatch", "--parsable", *words, user=BOB)
    later()
    follow.tick(scheduler)
    assert job.attempts.get().scheduler_id == ours
    assert way.posts == 1


def test_a_lost_answer_and_a_cancel_leave_none(
    slurm: Cluster, way: Wire, scheduler: Slurm, alice: User, job: Job, folder: Path, end: Callable[[], None]
) -> None:
    way.cut = True
    follow.tick(scheduler)
    cancel(alice, job)
    later()
    follow.tick(scheduler)
    slurm.wait_for(lambda: _ticked(scheduler, job), "the job to be cancelled")
    assert {state for _, state in jobs_of(slurm, job)} == {"CANCELLED"}
    assert way.posts == 1


def test_a_request_that_arrives_after_its_cancel_is_hunted_down(
    slurm: Cluster, way: Wire, scheduler: Slurm, alice: User, job: Job, folder: Path, end: Callable[[], None]
) -> None:
    way.late = True
    follow.tick(scheduler)
    assert way.holds
    cancel(alice, job)
    later()
    follow.tick(scheduler)
    assert job.attempts.get().state == "cancelled"
    assert jobs_of(slurm, job) == []
    way.let_through()
    assert len(jobs_of(slurm, job)) == 1

    def hunted() -> bool:
        later()
        strays.cancel_due(_turn(scheduler))
        return not Stray.objects.exclude(scheduler_id="").exists() and _states(slurm, job) == {"CANCELLED"}

    slurm.wait_for(hunted, "what came late to be cancelled and gone")
    assert way.posts == 1


def test_a_lost_answer_leaves_a_single_array_of_a_sweep(
    slurm: Cluster,
    way: Wire,
    scheduler: Slurm,
    folder: Path,
    alice: User,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arrays, "prepare", handover.prepare)  # `folder` plays it
    monkeypatch.setenv("PATH", slurm.environment["PATH"])  # to scancel, which an old Slurm needs
    text = 'name = "lost"\n[resources]\ntime_limit = "00:05:00"\n[sweep.over]\n"run.seed" = [1, 2, 3]\n'
    sweep, _ = sweeps.submit(alice, SweepSpec.parse_toml(text), spec_toml=text)
    way.cut = True
    follow.tick(scheduler)
    assert {attempt.scheduler_id for attempt in _attempts(sweep)} == {""}
    slurm.wait_for(lambda: len(ran(folder)) == 3, "all to run, unknown to us")
    later()
    follow.tick(scheduler)
    ids = [attempt.scheduler_id for attempt in _attempts(sweep)]
    array = ids[0].partition("_")[0]
    assert (ids, way.posts) == ([f"{array}_{n}" for n in range(3)], 1)
    follow.tick(scheduler)
    assert {attempt.state for attempt in _attempts(sweep)} == {"running"}
    sweeps.cancel(alice, sweep)
    slurm.wait_for(lambda: _killed(scheduler, sweep), "all to be cancelled")
    assert len(ran(folder)) == 3


def test_single_tasks_of_an_array_are_cancelled_whatever_their_number(
    slurm: Cluster, scheduler: Slurm, folder: Path, alice: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancel one that waits, which Slurm forgets silently, and the last to start, whose number is the array's own."""
    monkeypatch.setattr(arrays, "prepare", handover.prepare)
    monkeypatch.setenv("PATH", slurm.environment["PATH"])
    text = 'name = "single"\n[resources]\ntime_limit = "00:05:00"\n[sweep]\nat_once = 3\n[sweep.over]\n'
    text += '"run.seed" = [1, 2, 3, 4, 5]\n'
    sweep, _ = sweeps.submit(alice, SweepSpec.parse_toml(text), spec_toml=text)

    def state_of(index: int) -> str:
        earlier = timezone.now() - timedelta(minutes=5)
        attempts = Attempt.objects.filter(ended_at=None).exclude(cancel_asked_at=None)
        attempts.update(cancel_killed_at=None, cancel_signalled_at=earlier)
        follow.tick(scheduler)
        return Attempt.objects.get(job__sweep=sweep, job__sweep_index=index).state

    slurm.wait_for(lambda: state_of(2) == "running", "three to run")
    cancel(alice, sweep.jobs.get(sweep_index=3))
    slurm.wait_for(lambda: state_of(3) == "cancelled", "the fourth to be cancelled while it waits")
    assert [attempt.state for attempt in _attempts(sweep)] == ["running"] * 3 + ["cancelled", "pending"]
    cancel(alice, sweep.jobs.get(sweep_index=0))
    slurm.wait_for(lambda: state_of(0) == "cancelled", "the first to be cancelled")
    slurm.wait_for(lambda: state_of(4) == "running", "the last to run")
    array = _attempts(sweep)[4].scheduler_id.partition("_")[0]
    assert f"{array} 4" in slurm.run("squeue", "-h", f"--user={ALICE}", "--format=%A %K").splitlines()
    cancel(alice, sweep.jobs.get(sweep_index=4))
    slurm.wait_for(lambda: state_of(4) == "cancelled", "the last to be cancelled")
    assert [attempt.state for attempt in _attempts(sweep)] == [
        "cancelled",
        "running",
        "running",
        "cancelled",
        "cancelled",
    ]
    sweeps.cancel(alice, sweep)
    slurm.wait_for(lambda: _killed(scheduler, sweep), "all to be cancelled")
    assert len(ran(folder)) == 4


def _ticked(scheduler: Slurm, job: Job) -> bool:
    Attempt.objects.update(cancel_killed_at=None, cancel_signalled_at=timezone.now() - timedelta(minutes=5))
    follow.tick(scheduler)
    return job.attempts.get().ended_at is not None


def _turn(scheduler: Slurm) -> follow.Tick:
    claim = follow.lease.take("follow")
    assert claim is not None
    claim.release()
    return follow.Tick(claim, scheduler)


def _states(slurm: Cluster, job: Job) -> set[str]:
    return {state for _, state in jobs_of(slurm, job)}


def _attempts(sweep: Sweep) -> list[Attempt]:
    return list(Attempt.objects.filter(job__sweep=sweep).order_by("job__sweep_index"))


def _killed(scheduler: Slurm, sweep: Sweep) -> bool:
    earlier = timezone.now() - timedelta(minutes=5)
    Attempt.objects.filter(ended_at=None).update(cancel_killed_at=None, cancel_signalled_at=earlier)
    follow.tick(scheduler)
    return {attempt.state for attempt in _attempts(sweep)} <= {"cancelled"}
