"""Submitting, resuming, cancelling and deleting, as the API and the pages call them."""

from __future__ import annotations

import io
import json
import stat
import tarfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from jobs import handover, reports, rundir, upload
from jobs import submit as submitting
from jobs.dryrun import dry_run
from jobs.errors import Conflict, IdempotencyConflict, Refused, SpecError
from jobs.models import Attempt, Checkpoint, Job
from jobs.spec import JobSpec, write_toml
from jobs.submit import cancel, delete, resume, submit
from nodes import inventory
from nodes.models import DEMO
from nodes.schedulers.base import SchedulerError, Submission
from portal.models import IdempotencyKey, Project, User
from portal.series import store
from tests.jobs import reporting
from tests.jobs.schedulers import Told
from tests.lab import a_job, a_project, person, sysadmin

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, settings: Any) -> None:
    settings.VIGIL_RUNS = tmp_path / "runs"


@pytest.fixture
def project() -> Project:
    return a_project()


@pytest.fixture
def oskar(project: Project) -> User:
    return person("oskar", project)


@pytest.fixture
def told() -> Told:
    return Told()


def spec_of(**changes: Any) -> JobSpec:
    return JobSpec.parse({"name": "gpt", **changes})


def ask(user: User, spec: JobSpec | None = None, **options: Any) -> tuple[Job, bool]:
    spec = spec or spec_of()
    return submit(user, spec, spec_toml=write_toml(spec), **options)


def packed(**files: str) -> bytes:
    """A tar.gz; names with a slash as `src__model.py`."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(name.replace("__", "/").replace("_py", ".py"))
            member.size, member.mode = len(text), 0o755
            archive.addfile(member, io.BytesIO(text.encode()))
    return buffer.getvalue()


def newest() -> Attempt:
    return Attempt.objects.latest("number")


def stalled(job: Job) -> None:
    """Whoever has claimed the job's attempt did so longer ago than any request may take."""
    earlier = timezone.now() - timedelta(seconds=40)
    Attempt.objects.filter(job=job, ended_at=None, scheduler_id="").update(submitting_at=earlier)


def overtaken(monkeypatch: pytest.MonkeyPatch, job: Job, told: Told, *, error: OSError | None = None) -> None:
    """While one worker writes the run directory, a second one hands the attempt over."""
    prepare = handover.prepare

    def slow(attempt: Attempt) -> Path:
        monkeypatch.setattr(handover, "prepare", prepare)
        stalled(job)
        handover.hand_over(attempt.pk, told)
        if error is not None:
            raise error
        return prepare(attempt)

    monkeypatch.setattr(handover, "prepare", slow)


class TestSubmit:
    def test_writes_a_job_and_its_first_attempt(self, oskar: User) -> None:
        job, created = ask(oskar, spec_of(tags=["a", "b"], notes="why"))
        assert created
        assert job.latest is not None
        assert (job.latest.number, job.latest.state, job.latest.origin) == (1, "pending", "submitted")
        assert (job.owner, job.notes, job.latest.steps) == (oskar, "why", 200)
        assert sorted(job.tags.values_list("name", flat=True)) == ["a", "b"]
        assert JobSpec.parse(job.spec) == spec_of(tags=["a", "b"], notes="why")
        assert handover.due() == [job.latest.pk]

    def test_a_key_makes_one_job(self, oskar: User, project: Project) -> None:
        first, created = ask(oskar, key="k1")
        again, created_again = ask(oskar, key="k1")
        assert (first.pk, created, created_again) == (again.pk, True, False)
        with pytest.raises(IdempotencyConflict):
            ask(oskar, spec_of(notes="another"), key="k1")
        assert Job.objects.count() == 1
        assert ask(person("nora", project), key="k1")[1]  # another person's key is another key

    def test_a_key_is_forgotten_after_a_day(self, oskar: User) -> None:
        first, _ = ask(oskar, key="k1")
        IdempotencyKey.objects.update(created_at=timezone.now() - timedelta(hours=25))
        second, created = ask(oskar, spec_of(notes="another"), key="k1")
        assert created
        assert first.pk != second.pk

    def test_only_projects_of_ones_own(self, oskar: User) -> None:
        a_project("siskin")
        with pytest.raises(SpecError) as error:
            ask(oskar, spec_of(project="siskin"))
        assert error.value.problems[0].field == "project"
        assert "Choose one of default." in str(error.value)
        assert Job.objects.count() == 0

    def test_impossible_resources(self, oskar: User, settings: Any) -> None:
        inventory.sync(Told())
        for resources, field, says in (
            ({"gpus_per_node": 8}, "resources.gpus_per_node", "Take at most 4"),
            ({"ranks_per_node": 16}, "resources.ranks_per_node", "8"),
            ({"cpus_per_rank": 9}, "resources.cpus_per_rank", "8"),
            ({"nodes": 3, "ranks_per_node": 4}, "resources.ranks_per_node", "3 nodes"),
            ({"memory_gib": 65.0}, "resources.memory_gib", "Take at most 64"),
        ):
            with pytest.raises(SpecError) as error:
                ask(oskar, spec_of(resources=resources, run={"global_batch": 48}))
            assert error.value.problems[0].field == field
            assert says in error.value.problems[0].message
        settings.VIGIL_SCHEDULER = "slurm"
        with pytest.raises(SpecError) as error:
            ask(oskar, spec_of(resources={"nodes": 2}))
        assert error.value.problems[0].field == "resources.nodes"

    def test_programs_of_others_need_a_decision_on_this_machine(self, oskar: User, settings: Any) -> None:
        spec = spec_of(kind="script", script={"directory": "."})
        with pytest.raises(Refused, match="VIGIL_LOCAL_TRUST=everyone"):
            ask(oskar, spec, code=packed(train_py=""))
        settings.VIGIL_LOCAL_TRUST = "everyone"
        assert ask(oskar, spec, code=packed(train_py=""))[1]

    def test_no_path_of_a_spec_is_opened(self) -> None:
        spec = spec_of(kind="script", script={"directory": "/etc", "entry": "passwd"})
        a_project()
        with pytest.raises(SpecError, match="opens no folder of yours"):
            ask(sysadmin(), spec)


class TestHandOver:
    def test_writes_the_run_directory_and_asks_once(self, oskar: User, told: Told) -> None:
        job, _ = ask(oskar)
        assert job.latest_id is not None
        handover.hand_over(job.latest_id, told)
        handover.hand_over(job.latest_id, told)
        attempt = Attempt.objects.select_related("job").get(pk=job.latest_id)
        assert (len(told.submissions), attempt.scheduler_id) == (1, "101")
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
        asked = told.submissions[0]
        assert (asked.key, asked.time_limit_s, asked.grace_s, asked.cpus_per_node) == (attempt.key, 3600, 30, 1)

    def test_an_answer_that_was_lost_is_looked_up_not_repeated(self, oskar: User, told: Told) -> None:
        job, _ = ask(oskar)
        assert job.latest_id is not None
        told.loses_answers = True
        handover.hand_over(job.latest_id, told)
        told.loses_answers = False
        assert handover.due() == []  # not before any request must have ended
        handover.hand_over(job.latest_id, told)
        assert len(told.submissions) == 1
        Attempt.objects.update(submitting_at=timezone.now() - timedelta(seconds=31))
        assert handover.due() == [job.latest_id]
        handover.hand_over(job.latest_id, told)
        assert len(told.submissions) == 1
        assert Attempt.objects.get().scheduler_id == "101"

    def test_a_refusal_ends_the_attempt_with_its_words(self, oskar: User, told: Told) -> None:
        job, _ = ask(oskar)
        assert job.latest_id is not None
        told.broken = SchedulerError("Account siskin may not use partition h100.", permanent=True)
        handover.hand_over(job.latest_id, told)
        attempt = Attempt.objects.get()
        assert (attempt.state, attempt.cause, attempt.reason) == ("failed", "rejected", str(told.broken))

    def test_no_time_to_stop_is_refused(self, oskar: User, told: Told) -> None:
        job, _ = ask(oskar, spec_of(resources={"time_limit": "00:02:00"}))
        assert job.latest is not None
        now = timezone.now()
        Checkpoint.objects.create(job=job, attempt=job.latest, step=1, generation=1, seconds=50, created_at=now)
        handover.hand_over(job.latest.pk, told)
        assert not told.submissions
        assert "takes 130 s" in Attempt.objects.get().reason

    def test_a_silent_scheduler_is_asked_again(self, oskar: User, told: Told) -> None:
        job, _ = ask(oskar)
        assert job.latest_id is not None
        told.broken = SchedulerError("Slurm did not answer for 10 s.")
        handover.hand_over(job.latest_id, told)
        attempt = Attempt.objects.get()
        assert (attempt.state, attempt.ended_at) == ("pending", None)
        assert "did not answer" in attempt.reason

    def test_not_while_the_attempt_before_is_alive(self, oskar: User, told: Told, project: Project) -> None:
        job, _ = ask(oskar)
        assert job.latest_id is not None
        handover.hand_over(job.latest_id, told)
        Attempt.objects.update(ended_at=timezone.now(), decided_at=timezone.now(), state="node_fail")
        following = resume(oskar, job)
        handover.hand_over(following.pk, told)
        assert len(told.submissions) == 1
        told.say("101", state="node_fail")
        handover.hand_over(following.pk, told)
        assert len(told.submissions) == 2

    def test_who_wakes_after_a_cancel_leaves_nothing_running(
        self, oskar: User, told: Told, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """One worker stalls in its request; the person cancels, a second finds nothing and ends it; then it arrives."""
        job, _ = ask(oskar)
        submit_now = told.submit

        def slow(submission: Submission) -> str:
            stalled(job)
            cancel(oskar, job)
            handover.hand_over(newest().pk, told)
            return submit_now(submission)

        monkeypatch.setattr(told, "submit", slow)
        handover.hand_over(newest().pk, told)
        assert (newest().state, newest().scheduler_id) == ("cancelled", "")
        assert told.cancelled == ["101"]

    def test_who_wakes_before_asking_does_not_ask(
        self, oskar: User, told: Told, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        job, _ = ask(oskar)
        overtaken(monkeypatch, job, told)
        handover.hand_over(newest().pk, told)
        assert len(told.submissions) == 1
        assert (newest().state, newest().scheduler_id) == ("pending", "101")
        assert not told.cancelled

    def test_who_fails_late_ends_nothing(self, oskar: User, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
        """By then a second worker has submitted it."""
        job, _ = ask(oskar)
        overtaken(monkeypatch, job, told, error=OSError("code: Directory not empty"))
        handover.hand_over(newest().pk, told)
        assert (newest().state, newest().scheduler_id, newest().ended_at) == ("pending", "101", None)
        assert newest().reason == ""

    def test_two_that_were_submitted_leave_one(self, oskar: User, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
        """The second worker does not find the first one's job, which is on its way, and submits; both answers come."""
        job, _ = ask(oskar)
        submit_now = told.submit

        def slow(submission: Submission) -> str:
            monkeypatch.setattr(told, "submit", submit_now)
            stalled(job)
            handover.hand_over(newest().pk, told)
            return submit_now(submission)

        monkeypatch.setattr(told, "submit", slow)
        handover.hand_over(newest().pk, told)
        assert newest().scheduler_id == "101"
        assert told.cancelled == ["102"]

    def test_a_scripts_code_lies_in_the_run_directory(self, told: Told) -> None:
        a_project()
        spec = spec_of(kind="script", script={"directory": ".", "entry": "src/train.py"})
        job, _ = ask(sysadmin(), spec, code=packed(src__train_py="print(1)", README="hello"))
        assert job.latest_id is not None
        handover.hand_over(job.latest_id, told)
        job.refresh_from_db()
        code = rundir.path_of(job.directory) / "job" / "code"
        assert (code / "src" / "train.py").read_text() == "print(1)"
        assert not list((rundir.runs_root() / upload.UPLOADS).iterdir())
        text = (rundir.path_of(job.directory) / "portal" / "run.toml").read_text()
        assert 'entry = "src/train.py"' in text
        assert "directory" not in text
        sent = json.loads((rundir.path_of(job.directory) / "portal" / "code.json").read_text())
        assert (len(sent["digest"]), sent["commit"], sent["dirty"]) == (64, "", False)


class TestResume:
    def checkpoint(self, job: Job, step: int, **fields: Any) -> Checkpoint:
        values = {"generation": 1, "name": f"step-{step}", "created_at": timezone.now(), "attempt": job.latest}
        return Checkpoint.objects.create(job=job, step=step, **{**values, **fields})

    def test_from_the_newest_or_the_one_named(self, oskar: User, project: Project, told: Told) -> None:
        job = a_job(oskar, project, state="failed")
        for step in (100, 200):
            self.checkpoint(job, step)
        attempt = resume(oskar, job, step=100)
        assert (attempt.number, attempt.origin) == (2, "resumed")
        assert attempt.resume_from is not None
        assert attempt.resume_from.step == 100
        handover.hand_over(attempt.pk, told)
        job.refresh_from_db()
        hint = json.loads((rundir.path_of(job.directory) / "portal" / "attempt.json").read_text())
        assert hint == {"number": 2, "resume": "step-100"}
        Attempt.objects.filter(pk=attempt.pk).update(ended_at=timezone.now(), decided_at=timezone.now(), state="failed")
        newest = resume(oskar, Job.objects.get()).resume_from
        assert newest is not None
        assert newest.step == 100  # the line it is on, not the highest number

    def test_while_it_runs_is_a_conflict(self, oskar: User, project: Project) -> None:
        job = a_job(oskar, project, state="running")
        with pytest.raises(Conflict, match="has not ended"):
            resume(oskar, job)

    def test_a_completed_one_needs_a_step_or_more_steps(self, oskar: User, project: Project) -> None:
        job = a_job(oskar, project, state="completed")
        self.checkpoint(job, 200)
        with pytest.raises(Conflict, match="has completed"):
            resume(oskar, job)
        with pytest.raises(SpecError, match="not beyond the checkpoint"):
            resume(oskar, job, steps=200)
        resume(oskar, job, steps=400)
        job.refresh_from_db()
        assert job.spec["run"]["steps"] == 400
        assert "steps = 400" in job.spec_toml
        assert job.spec_toml.startswith("# as written")

    def test_an_unknown_step_names_the_nearest(self, oskar: User, project: Project) -> None:
        job = a_job(oskar, project, state="failed")
        self.checkpoint(job, 100)
        self.checkpoint(job, 200, state="corrupt")
        with pytest.raises(SpecError, match="Nearest: 100"):
            resume(oskar, job, step=200)

    def test_a_key_makes_one_attempt(self, oskar: User, project: Project) -> None:
        job = a_job(oskar, project, state="failed")
        assert resume(oskar, job, key="k").pk == resume(oskar, job, key="k").pk
        with pytest.raises(IdempotencyConflict):
            resume(oskar, job, step=3, key="k")

    def test_the_same_request_twice_at_once_makes_one_attempt(
        self, oskar: User, project: Project, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The second one has found no answer yet; until it has the job's lock, the first one is through."""
        job = a_job(oskar, project, state="failed")
        answered, made = submitting._answered, []

        def look(*request: Any) -> int | None:
            found = answered(*request)
            if not made:
                monkeypatch.setattr(submitting, "_answered", answered)
                made.append(resume(oskar, job, key="k"))
            return found

        monkeypatch.setattr(submitting, "_answered", look)
        assert resume(oskar, job, key="k") == made[0]
        assert job.attempts.count() == 2

    def test_only_by_its_owner_or_a_lead(self, oskar: User, project: Project) -> None:
        job = a_job(oskar, project, state="failed")
        with pytest.raises(Refused, match="belongs to oskar"):
            resume(person("nora", project), job)
        assert resume(person("lena", project, role="lead"), job)


class TestCancelAndDelete:
    def test_cancel_is_a_wish_that_the_follower_grants(self, oskar: User, project: Project) -> None:
        job = a_job(oskar, project, state="running")
        cancel(oskar, job)
        attempt = Attempt.objects.get()
        assert attempt.cancel_asked_at is not None
        assert (attempt.cancel_asked_by, attempt.state) == (oskar, "running")
        cancel(oskar, job)  # again: no error

    def test_what_has_ended_cannot_be_cancelled(self, oskar: User, project: Project) -> None:
        with pytest.raises(Conflict, match="already ended: out of memory"):
            cancel(oskar, a_job(oskar, project, state="out_of_memory"))

    def test_before_it_was_submitted(self, oskar: User, told: Told) -> None:
        job, _ = ask(oskar)
        cancel(oskar, job)
        assert job.latest_id is not None
        handover.hand_over(job.latest_id, told)
        assert not told.submissions
        attempt = Attempt.objects.get()
        assert (attempt.state, attempt.cause) == ("cancelled", "cancelled")

    def test_no_report_is_taken_once_the_data_goes(
        self, oskar: User, project: Project, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Else its points would stay behind with no job."""
        job = a_job(oskar, project, state="failed")
        report = reporting.post(reporting.Spooled().log(1, loss=1.0))
        drop, refused = store.drop, []

        def report_first(owner: store.Owner) -> None:
            with pytest.raises(reports.Closed):
                reports.take(owner[1], report)
            refused.append(owner)
            drop(owner)

        monkeypatch.setattr(store, "drop", report_first)
        attempt = job.latest_id
        delete(oskar, job)
        assert refused == [("attempt", attempt)]

    def test_delete_takes_the_data_along(self, oskar: User, told: Told) -> None:
        job, _ = ask(oskar, key="k")
        assert job.latest_id is not None
        handover.hand_over(job.latest_id, told)
        with pytest.raises(Conflict, match="cancel it first"):
            delete(oskar, job)
        Attempt.objects.update(ended_at=timezone.now(), decided_at=timezone.now(), state="failed")
        root = rundir.path_of(Job.objects.get().directory)
        assert root.is_dir()
        delete(oskar, job)
        assert not Job.objects.exists()
        assert not root.exists()
        rundir.empty_trash()
        assert not list((rundir.runs_root() / rundir.TRASH).iterdir())


class TestDryRun:
    def test_says_what_it_would_do(self, oskar: User) -> None:
        inventory.sync(Told())
        found = {finding.title: finding for finding in dry_run(oskar, spec_of())}
        assert found["Specification"].level == "ok"
        assert found["Start"].text == "Starts now on dgx-01."
        assert found["Data"].text
        assert "free" in found["Disk"].text

    def test_says_what_it_waits_for(self, oskar: User, project: Project) -> None:
        inventory.sync(Told())
        inventory.Node.objects.update(cpus_used=8)
        a_job(oskar, project, state="running", name="wren")
        a_job(oskar, project, state="pending")
        start = next(finding for finding in dry_run(oskar, spec_of()) if finding.title == "Start")
        assert start.level == "warn"
        assert "1 CPU asked for, 0 free; 1 job waits before it" in start.text
        assert "wren" in start.text

    def test_nodes_of_the_demonstration_promise_nothing(self, oskar: User) -> None:
        inventory.sync(Told())
        inventory.Node.objects.update(cpus_used=8)
        inventory.Node.objects.create(name="a-made-up-one", partition=DEMO, cpus=224, gpus=8)
        start = next(finding for finding in dry_run(oskar, spec_of()) if finding.title == "Start")
        assert start.text.startswith("Waits")
        spec = spec_of(resources={"gpus_per_node": 8})
        assert "dgx-01 has 4." in dry_run(oskar, spec)[0].text

    def test_tells_refusals_as_findings(self, oskar: User) -> None:
        found = dry_run(oskar, spec_of(kind="script", script={"directory": "."}))
        assert [finding.level for finding in found] == ["error"]
        assert "VIGIL_LOCAL_TRUST" in found[0].text
