"""Test submitting, resuming, cancelling and deleting, as the API and the pages call them."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.utils import timezone

from jobs.disk import rundir, trash
from jobs.errors import Conflict, IdempotencyConflict, Refused, SpecError
from jobs.following.submission import handover
from jobs.intake import reports
from jobs.models import Attempt, Job
from jobs.spec import JobSpec
from jobs.submitting import submit as submitting
from jobs.submitting.submit import cancel, delete, resume
from nodes.cluster import sync
from portal.models import IdempotencyKey, Project, User
from portal.series import store
from tests.jobs import reporting
from tests.jobs.schedulers import DGX_01, ScriptedScheduler
from tests.jobs.submissions import ENTRIES, coded, its_code, spec_of, submit_spec
from tests.lab import a_checkpoint, a_job, a_project, on_disk, person, sysadmin

pytestmark = pytest.mark.django_db
TABLES = pytest.mark.parametrize("table", ENTRIES)


class TestSubmit:
    def test_writes_a_job_and_its_first_attempt(self, oskar: User) -> None:
        job, created = submit_spec(oskar, spec_of(tags=["a", "b"], notes="why"))
        assert created
        assert job.latest is not None
        assert (job.latest.number, job.latest.state, job.latest.origin) == (1, "pending", "submitted")
        assert (job.owner, job.notes, job.latest.steps) == (oskar, "why", 200)
        assert sorted(job.tags.values_list("name", flat=True)) == ["a", "b"]
        assert JobSpec.parse(job.spec) == spec_of(tags=["a", "b"], notes="why")
        assert handover.due() == [job.latest.pk]

    def test_a_key_makes_a_single_job(self, oskar: User, project: Project) -> None:
        first, created = submit_spec(oskar, key="k1")
        again, created_again = submit_spec(oskar, key="k1")
        assert (first.pk, created, created_again) == (again.pk, True, False)
        with pytest.raises(IdempotencyConflict):
            submit_spec(oskar, spec_of(notes="another"), key="k1")
        assert Job.objects.count() == 1
        assert submit_spec(person("nora", project), key="k1")[1]  # another person's key is another key

    def test_a_key_is_forgotten_after_a_day(self, oskar: User) -> None:
        first, _ = submit_spec(oskar, key="k1")
        IdempotencyKey.objects.update(created_at=timezone.now() - timedelta(hours=25))
        second, created = submit_spec(oskar, spec_of(notes="another"), key="k1")
        assert created
        assert first.pk != second.pk

    def test_only_projects_of_the_user(self, oskar: User) -> None:
        a_project("siskin")
        with pytest.raises(SpecError) as error:
            submit_spec(oskar, spec_of(project="siskin"))
        assert error.value.problems[0].field == "project"
        assert "Choose one of default." in str(error.value)
        assert Job.objects.count() == 0

    def test_impossible_resources(self, oskar: User) -> None:
        sync.sync(ScriptedScheduler())
        for resources, field, text in (
            ({"gpus_per_node": 8}, "resources.gpus_per_node", "Request at most 4"),
            ({"ranks_per_node": 16}, "resources.ranks_per_node", "8"),
            ({"cpus_per_rank": 9}, "resources.cpus_per_rank", "8"),
            ({"nodes": 3, "ranks_per_node": 4}, "resources.ranks_per_node", "3 nodes"),
            ({"memory_gib": 65.0}, "resources.memory_gib", "Request at most 64"),
        ):
            with pytest.raises(SpecError) as error:
                submit_spec(oskar, spec_of(resources=resources, run={"global_batch": 48}))
            assert error.value.problems[0].field == field
            assert text in error.value.problems[0].message
        sync.read(ScriptedScheduler(machines=[replace(DGX_01, plays_many=False)]))
        with pytest.raises(SpecError) as error:
            submit_spec(oskar, spec_of(resources={"nodes": 2}))
        assert error.value.problems[0].field == "resources.nodes"

    @TABLES
    def test_code_of_others_needs_a_decision_on_this_machine(self, oskar: User, settings: Any, table: str) -> None:
        fetched = coded(table, git="https://example.org/a.git", ref="main")
        for spec, code in ((coded(table), its_code(table)), (fetched, None)):
            settings.VIGIL_LOCAL_TRUST = "sysadmins"
            with pytest.raises(Refused, match="VIGIL_LOCAL_TRUST=everyone"):
                submit_spec(oskar, spec, code=code)
            settings.VIGIL_LOCAL_TRUST = "everyone"
            assert submit_spec(oskar, spec, code=code)[1]

    @TABLES
    def test_no_path_of_a_spec_is_opened(self, table: str) -> None:
        spec = coded(table, directory="/etc", entry="passwd")
        a_project()
        with pytest.raises(SpecError, match="upload a tar.gz of it, in the form under Code"):
            submit_spec(sysadmin(), spec)


class TestResume:
    @TABLES
    def test_code_of_others_needs_that_decision_still(
        self, oskar: User, project: Project, settings: Any, table: str
    ) -> None:
        spec = coded(table)
        job = a_job(oskar, project, state="failed", kind=spec.kind, spec=spec.model_dump(mode="json"))
        with pytest.raises(Refused, match="VIGIL_LOCAL_TRUST=everyone"):
            resume(oskar, job)
        settings.VIGIL_LOCAL_TRUST = "everyone"
        assert resume(oskar, job).number == 2

    def test_from_the_newest_or_a_named_checkpoint(
        self, oskar: User, project: Project, scheduler: ScriptedScheduler
    ) -> None:
        job = a_job(oskar, project, state="failed")
        for step in (100, 200):
            a_checkpoint(job, step)
        attempt = resume(oskar, job, step=100)
        assert (attempt.number, attempt.origin) == (2, "resumed")
        assert attempt.resume_from is not None
        assert attempt.resume_from.step == 100
        handover.hand_over(attempt.pk, scheduler)
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

    def test_a_completed_job_needs_a_step_or_more_steps(self, oskar: User, project: Project) -> None:
        job = a_job(oskar, project, state="completed")
        a_checkpoint(job, 200)
        with pytest.raises(Conflict, match="has completed"):
            resume(oskar, job)
        with pytest.raises(SpecError, match="not beyond the checkpoint"):
            resume(oskar, job, steps=200)
        with pytest.raises(Conflict, match="All 200 steps"):
            resume(oskar, job, step=200)
        resume(oskar, job, steps=400)
        job.refresh_from_db()
        assert job.spec["run"]["steps"] == 400
        assert "steps = 400" in job.spec_toml
        assert job.spec_toml.startswith("# as written")

    def test_an_unknown_step_names_the_nearest(self, oskar: User, project: Project) -> None:
        job = a_job(oskar, project, state="failed")
        a_checkpoint(job, 100)
        a_checkpoint(job, 200, state="corrupt")
        with pytest.raises(SpecError, match="Nearest: 100"):
            resume(oskar, job, step=200)

    def test_a_key_makes_a_single_attempt(self, oskar: User, project: Project) -> None:
        job = a_job(oskar, project, state="failed")
        assert resume(oskar, job, key="k").pk == resume(oskar, job, key="k").pk
        with pytest.raises(IdempotencyConflict):
            resume(oskar, job, step=3, key="k")

    def test_the_same_request_twice_at_once_makes_a_single_attempt(
        self, oskar: User, project: Project, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The second request has found no answer yet; the first is done before the second has the job's lock."""
        job = a_job(oskar, project, state="failed")
        answered, created = submitting.answered, []

        def answered_late(*request: Any) -> int | None:
            found = answered(*request)
            if not created:
                monkeypatch.setattr(submitting, "answered", answered)
                created.append(resume(oskar, job, key="k"))
            return found

        monkeypatch.setattr(submitting, "answered", answered_late)
        assert resume(oskar, job, key="k") == created[0]
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

    def test_before_it_was_submitted(self, oskar: User, scheduler: ScriptedScheduler) -> None:
        job, _ = submit_spec(oskar)
        cancel(oskar, job)
        assert job.latest_id is not None
        handover.hand_over(job.latest_id, scheduler)
        assert not scheduler.submissions
        attempt = Attempt.objects.get()
        assert (attempt.state, attempt.cause) == ("cancelled", "cancelled")

    def test_no_report_is_taken_once_the_data_goes(
        self, oskar: User, project: Project, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Otherwise its points would stay behind without a job."""
        job = a_job(oskar, project, state="failed")
        report = reporting.post(reporting.Spooled().log(1, loss=1.0))
        drop, refused = store.drop, []

        def report_first(owner: store.Owner) -> None:
            with pytest.raises(reports.AttemptClosed):
                reports.ingest(owner[1], report)
            refused.append(owner)
            drop(owner)

        monkeypatch.setattr(store, "drop", report_first)
        attempt = job.latest_id
        delete(oskar, job)
        assert refused == [("attempt", attempt)]

    def test_delete_takes_the_data_along(self, oskar: User, scheduler: ScriptedScheduler) -> None:
        job, _ = submit_spec(oskar, key="k")
        assert job.latest_id is not None
        handover.hand_over(job.latest_id, scheduler)
        with pytest.raises(Conflict, match="cancel it first"):
            delete(oskar, job)
        Attempt.objects.update(ended_at=timezone.now(), decided_at=timezone.now(), state="failed")
        root = rundir.path_of(Job.objects.get().directory)
        assert root.is_dir()
        delete(oskar, job)
        assert not Job.objects.exists()
        assert not root.exists()
        trash.empty()
        assert not list((rundir.runs_root() / trash.TRASH).iterdir())

    def test_what_lies_on_a_file_system_that_is_away_is_not_forgotten(self, oskar: User, project: Project) -> None:
        job = a_job(oskar, project, state="failed")
        root, runs = on_disk(job), rundir.runs_root()
        runs.rename(runs.with_name("away"))
        runs.mkdir()
        with pytest.raises(Conflict, match="mount its file system"):
            delete(oskar, job)
        assert list(runs.iterdir()) == []
        runs.rmdir()
        runs.with_name("away").rename(runs)
        delete(oskar, job)
        assert not root.exists()

    @pytest.mark.django_db(transaction=True)
    def test_what_the_database_keeps_stays_on_disk(
        self, oskar: User, project: Project, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A commit may fail, as on a full disk: the job is still there, and so must be its checkpoints."""
        job = a_job(oskar, project, state="failed", directory="default/1-abcdef")
        root = rundir.path_of(job.directory)
        root.mkdir(parents=True)

        def full() -> None:
            raise OperationalError("database or disk is full")

        monkeypatch.setattr(connection, "commit", full)
        with pytest.raises(OperationalError):
            delete(oskar, job)
        monkeypatch.undo()
        assert Job.objects.filter(pk=job.pk).exists()
        assert root.is_dir()
        delete(oskar, job)
        assert not root.exists()
