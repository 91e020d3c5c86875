"""Test deriving why an attempt ended from its records; and checkpoints on their lines."""

from __future__ import annotations

import errno
import os
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from diagnosis.causes import CAUSES
from jobs import checkpoints
from jobs.disk import rundir
from jobs.following.decisions.policy import UNCOUNTED, decide
from jobs.following.end_causes.cause import CAUSE_TEXTS, AttemptEnd, cause_of
from jobs.following.end_causes.end_reason import BY_END
from jobs.intake import reports, verify
from jobs.models import Attempt, Checkpoint, Job
from tests.jobs.reporting import Spooled, note_checkpoints, post
from tests.lab import a_job, a_project, on_disk, person
from training import manifest


def failed(kind: str, **more: Any) -> dict[str, Any]:
    return {"cause": "failed", "first_failure": {"rank": 0, "kind": kind, **more}}


def stopped(code: int, request: str, cause: str = "stopped") -> dict[str, Any]:
    """Return the launcher's final report; exit code 75: it had saved."""
    return {"cause": cause, "exit_code": code, "asked": request, "first_failure": None}


@pytest.mark.parametrize(
    ("ended", "cause"),
    [
        (AttemptEnd("completed", 0), "completed"),
        (AttemptEnd("completed", 0, cancelled=True), "completed"),
        (AttemptEnd("failed", 75), "stopped"),
        (AttemptEnd("timeout", 75), "stopped"),
        (AttemptEnd("failed", 75, cancelled=True), "cancelled"),
        (AttemptEnd("cancelled"), "cancelled"),
        (AttemptEnd("preempted"), "preempted"),
        (AttemptEnd("requeued"), "requeued"),
        (AttemptEnd("requeued", result={"cause": "stopped"}), "stopped"),
        (AttemptEnd("node_fail"), "node_fail"),
        (AttemptEnd("boot_fail"), "node_fail"),
        (AttemptEnd("timeout", signal=15), "timeout"),
        (AttemptEnd("deadline"), "timeout"),
        (AttemptEnd("out_of_memory", 137), "out_of_memory"),
        (AttemptEnd("failed", 1, result=failed("exception")), "exception"),
        (
            AttemptEnd("failed", 1, result=failed("exception", error="NumericsError: numerics.divergence: at 7")),
            "diverged",
        ),
        (
            AttemptEnd("failed", 1, result=failed("exception", error="a.NumericsError: numerics.nonfinite: 7")),
            "nonfinite",
        ),
        (
            AttemptEnd("failed", 1, result=failed("exception", error="NumericsError: numerics.corruption: 7")),
            "corruption",
        ),
        (AttemptEnd("failed", 1, result=failed("exception", error="NumericsError: numerics.other: 7")), "exception"),
        (AttemptEnd("failed", 1, result=failed("exception", error="ValueError: numerics.nonfinite: 7")), "exception"),
        (AttemptEnd("failed", 137, result=failed("signal", signal=9)), "lost"),
        (AttemptEnd("failed", 1, result=failed("lost_peer")), "lost"),
        (AttemptEnd("failed", 137, result={"cause": "hang", "first_failure": {"rank": 1, "kind": "hang"}}), "hang"),
        (AttemptEnd("failed", 137, result={"cause": "stop_timeout", "first_failure": None}), "hang"),
        (AttemptEnd("failed", 137, result=stopped(137, "time_limit", "stop_timeout")), "timeout"),
        (AttemptEnd("failed", 137, result=stopped(137, "signal", "stop_timeout")), "hang"),
        (AttemptEnd("failed", 143, result=stopped(143, "time_limit")), "timeout"),
        (AttemptEnd("failed", 143, result=stopped(143, "time_limit"), cancelled=True), "cancelled"),
        (AttemptEnd("failed", 143, result=stopped(143, "signal")), "stopped"),
        (AttemptEnd("failed", 75, result=stopped(75, "time_limit")), "stopped"),
        (AttemptEnd("requeued", None, result=stopped(75, "signal")), "stopped"),
        (AttemptEnd("preempted", None, 15, result=stopped(75, "signal")), "stopped"),
        (AttemptEnd("preempted", None, 15, result=stopped(143, "signal")), "preempted"),
        (AttemptEnd("node_fail", None, 15, result=stopped(75, "signal")), "stopped"),
        (AttemptEnd("node_fail", None, 15, result=stopped(143, "signal")), "node_fail"),
        (AttemptEnd("failed", 1, result={"cause": "node", "first_failure": None}), "node_fail"),
        (AttemptEnd("failed", 1, result={"cause": "unsaved", "first_failure": None}), "unsaved"),
        (AttemptEnd("failed", 1, result={"cause": "unsaved", "first_failure": None}, cancelled=True), "cancelled"),
        (AttemptEnd("failed", None, 53, launch_failure="permission"), "permission"),
        (AttemptEnd("failed", None, 53, launch_failure="launch"), "launch"),
        (AttemptEnd("failed", 1, result={"cause": "fenced", "first_failure": None}), "fenced"),
        (AttemptEnd("failed", 137), "lost"),
        (AttemptEnd("failed", None, 9), "lost"),
        (AttemptEnd("failed", 2), "failed"),
    ],
)
def test_causes(ended: AttemptEnd, cause: str) -> None:
    assert cause_of(ended)[0] == cause
    assert cause in CAUSE_TEXTS


def test_every_end_has_words_and_stands_for_a_cause() -> None:
    assert set(CAUSE_TEXTS) >= {*BY_END, *UNCOUNTED}
    assert set(BY_END.values()) <= set(CAUSES)


@pytest.fixture
def job(db: None, tmp_path: Path, settings: Any) -> Job:
    settings.VIGIL_RUNS = tmp_path / "runs"
    project = a_project()
    return a_job(person("oskar", project), project, state="failed")


@pytest.fixture
def attempt(job: Job) -> Attempt:
    return Attempt.objects.select_related("job").get()


def event(step: int, generation: int = 1, kind: str = "checkpoint.committed", **more: Any) -> dict[str, Any]:
    return {"kind": kind, "step": step, "generation": generation, "time": 1.7e9, "bytes": 10, "seconds": 0.5, **more}


class TestCheckpoints:
    def test_are_registered_once_and_pruned(self, attempt: Attempt) -> None:
        for _ in range(2):
            note_checkpoints(attempt, event(100, parent_step=None, world_size=2, consumed_samples=3200))
        row = Checkpoint.objects.get()
        assert (row.step, row.name, row.bytes, row.seconds, row.world_size) == (100, "step-100", 10, 0.5, 2)
        note_checkpoints(attempt, event(100, kind="checkpoint.pruned"))
        assert Checkpoint.objects.get().state == "pruned"
        note_checkpoints(attempt, event(100))  # a repeat of the older event brings nothing back
        assert Checkpoint.objects.get().state == "pruned"

    def test_what_was_requeued_shows_where_it_goes_on(self, attempt: Attempt) -> None:
        note_checkpoints(attempt, event(100))
        started = {"kind": "run.started", "start_step": 100, "resumed_from": "step-100", "time": 1.7e9}
        note_checkpoints(attempt, started)
        assert attempt.resume_from is None, "in place, from its own"
        second = Attempt.objects.create(job=attempt.job, number=2, state="running", origin=Attempt.Origin.REQUEUED)
        for name in (None, "step-7", ["?"]):
            note_checkpoints(second, {**started, "resumed_from": name})
            assert second.resume_from is None
        for _ in range(2):
            note_checkpoints(second, started)
        second.refresh_from_db()
        assert second.resume_from == Checkpoint.objects.get()
        request = Attempt.objects.create(job=attempt.job, number=3, origin=Attempt.Origin.RESUMED)
        note_checkpoints(request, started)
        assert request.resume_from is None, "a person's own choice stays"

    def test_the_launcher_of_a_custom_program_reports_where_it_goes_on(self, attempt: Attempt) -> None:
        Job.objects.update(kind="script")
        attempt = Attempt.objects.select_related("job").get()
        note_checkpoints(attempt, event(100))
        second = Attempt.objects.create(job=attempt.job, number=2, state="running", origin=Attempt.Origin.REQUEUED)
        payload = {"incarnation": 0, "nodes": ["dgx01"], "resumed_from": ""}
        launcher = Spooled(rank=-1).add_event("incarnation.started", **payload)
        reports.ingest(second.pk, post(launcher))
        second.refresh_from_db()
        assert second.resume_from is None, "from the beginning"
        launcher.add_event("incarnation.started", **{**payload, "incarnation": 1, "resumed_from": "step-100"})
        reports.ingest(second.pk, post((launcher, 1, 2)))
        second.refresh_from_db()
        assert second.resume_from == Checkpoint.objects.get()

    def test_a_checkpoint_that_its_trainer_found_damaged_is_started_from_no_more(self, attempt: Attempt) -> None:
        note_checkpoints(attempt, event(100))
        note_checkpoints(attempt, event(200, parent_step=100, parent_generation=1))
        Checkpoint.objects.filter(step=200).update(state="verified")
        note_checkpoints(attempt, event(200, kind="checkpoint.damaged", reason="its sha256 differs"))
        note_checkpoints(attempt, event(200, 7, kind="checkpoint.damaged", reason=["?"]))
        row = Checkpoint.objects.get(step=200)
        assert (row.state, row.problem) == ("corrupt", "its sha256 differs")
        newest = checkpoints.newest_on_line(attempt)
        assert newest is not None
        assert newest.step == 100

    def test_a_checkpoint_reported_late_takes_no_name_from_a_newer_checkpoint(self, attempt: Attempt) -> None:
        note_checkpoints(attempt, event(200, 2))
        note_checkpoints(attempt, event(200, 1))
        names = dict(Checkpoint.objects.values_list("generation", "name"))
        assert names == {1: "step-200.g1", 2: "step-200"}

    def test_a_checkpoint_reported_after_it_was_pruned_is_gone(self, attempt: Attempt) -> None:
        pruned = Spooled(incarnation=1).add_event("checkpoint.pruned", step=200, generation=1)
        committed = Spooled().add_event("checkpoint.committed", step=200, generation=1, parent_step=100)
        committed.add_event("checkpoint.committed", step=300, generation=1)
        reports.ingest(attempt.pk, post(pruned, committed))
        states = dict(Checkpoint.objects.values_list("step", "state"))
        assert states == {200: "pruned", 300: "committed"}
        assert Checkpoint.objects.get(step=200).parent_step == 100

    def test_a_checkpoint_that_was_damaged_and_rewritten_counts(self, attempt: Attempt) -> None:
        note_checkpoints(attempt, event(200, bytes=7))
        note_checkpoints(attempt, event(200, kind="checkpoint.damaged", reason="its sha256 differs"))
        note_checkpoints(attempt, event(200, bytes=8))
        row = Checkpoint.objects.get()
        assert (row.state, row.problem, row.bytes) == ("committed", "", 8)
        note_checkpoints(attempt, event(200, kind="checkpoint.pruned"))
        note_checkpoints(attempt, event(200))
        assert Checkpoint.objects.get().state == "pruned", (
            "reported again by an attempt that starts from it, before it was removed"
        )

    def test_another_line_moves_the_older_checkpoint_aside(self, attempt: Attempt) -> None:
        note_checkpoints(attempt, event(100, 1))
        note_checkpoints(attempt, event(100, 3))
        names = dict(Checkpoint.objects.values_list("generation", "name"))
        assert names == {1: "step-100.g1", 3: "step-100"}

    def test_a_start_from_the_older_checkpoint_moves_nothing(self, attempt: Attempt) -> None:
        for generation in (1, 3):
            note_checkpoints(attempt, event(100, generation, name="step-100"))
        note_checkpoints(attempt, event(100, 1, name="step-100.g1"))
        note_checkpoints(attempt, event(100, 2, name="step-100.g2"))  # no process had survived to report it
        names = dict(Checkpoint.objects.values_list("generation", "name"))
        assert names == {1: "step-100.g1", 2: "step-100.g2", 3: "step-100"}

    @pytest.mark.parametrize(
        "bad", [{"step": -1}, {"step": "1"}, {"step": True}, {"step": 2**63}, {"generation": None}]
    )
    def test_nonsense_is_left_out(self, attempt: Attempt, bad: dict[str, Any]) -> None:
        note_checkpoints(attempt, {**event(1), **bad})
        assert not Checkpoint.objects.exists()

    def test_odd_details_do_not_matter(self, attempt: Attempt) -> None:
        odd = {"bytes": "many", "seconds": float("nan"), "parent_step": [], "world_size": -1, "time": 1e300}
        note_checkpoints(attempt, event(1, **odd))
        row = Checkpoint.objects.get()
        assert (row.bytes, row.seconds, row.parent_step, row.world_size) == (0, None, None, None)

    def test_newest_is_newest_on_the_line(self, job: Job, attempt: Attempt) -> None:
        for step in (100, 200, 300):
            note_checkpoints(attempt, event(step, 1, parent_step=step - 100 or None, parent_generation=1))
        newest = checkpoints.newest_on_line(attempt)
        assert newest is not None
        assert newest.step == 300
        chosen = Checkpoint.objects.get(step=100)
        second = Attempt.objects.create(job=job, number=2, resume_from=chosen)
        assert checkpoints.newest_on_line(second) == chosen
        note_checkpoints(second, event(200, 2, parent_step=100, parent_generation=1))
        newest = checkpoints.newest_on_line(second)
        assert newest is not None
        assert (newest.step, newest.generation) == (200, 2)
        third = Attempt.objects.create(job=job, number=3, resume_from=newest)
        Checkpoint.objects.filter(pk=newest.pk).update(state="corrupt")
        third.refresh_from_db()
        assert checkpoints.newest_on_line(third) == chosen  # up the line of parents

    def test_line_of_any_number_of_attempts_is_gone_up(self, job: Job, attempt: Attempt) -> None:
        """A program without checkpoints is preempted every few hours."""
        Attempt.objects.bulk_create(Attempt(job=job, number=number, cause="preempted") for number in range(2, 1202))
        last = Attempt.objects.latest("number")
        assert decide(last, "preempted").text.endswith("Restarted from the beginning as attempt 1202.")
        note_checkpoints(attempt, event(100))
        assert checkpoints.newest_on_line(last) == Checkpoint.objects.get()

    def test_verification_finds_what_is_wrong(self, job: Job, attempt: Attempt) -> None:
        on_disk(job)
        for step, data in ((100, b"good"), (200, b"evil"), (300, None)):
            note_checkpoints(attempt, event(step, created_at=timezone.now()))
            write_checkpoint(rundir.path_of(job.directory) / "job" / "checkpoints", step, data)
        for _ in range(4):
            verify.verify_next()
        found = {row.step: (row.state, row.problem) for row in Checkpoint.objects.all()}
        assert found[100] == ("verified", "")
        assert found[200][0] == "corrupt"
        assert "sha256 differs" in found[200][1]
        assert found[300][0] == "corrupt"

    def test_large_numbers_are_stored(self, attempt: Attempt) -> None:
        large = {"bytes": 3 * 2**40, "consumed_samples": 2**40, "parent_step": 2**35, "parent_generation": 1}
        note_checkpoints(attempt, event(2**36, **large))
        row = Checkpoint.objects.get()
        assert row.step == 2**36
        assert {name: getattr(row, name) for name in large} == large

    def test_a_checkpoint_too_large_to_read_is_not_corrupt(
        self, job: Job, attempt: Attempt, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(verify, "MAX_BYTES", 3)
        on_disk(job)
        for step, data in ((100, b"good"), (200, b"short"), (300, None)):
            note_checkpoints(attempt, event(step))
            write_checkpoint(rundir.path_of(job.directory) / "job" / "checkpoints", step, data)
        for _ in range(3):
            assert verify.verify_next() is not None
        found = {row.step: row for row in Checkpoint.objects.all()}
        assert found[100].state == "committed"
        assert "Too large" in found[100].problem
        assert found[100].resumable
        assert (found[200].state, found[300].state) == ("corrupt", "corrupt")  # sizes and names are compared
        assert verify.verify_next() is None

    @pytest.mark.parametrize(
        "manifest",
        ['{"version": "\\ud800\\u0000"}', '{"version": 1, "files": [], "created": 1' + "0" * 400 + "}"],
        ids=["half a letter", "an endless number"],
    )
    def test_an_odd_manifest_does_not_stop_the_verification_of_others(
        self, job: Job, attempt: Attempt, manifest: str
    ) -> None:
        on_disk(job)
        for step in (100, 200):
            note_checkpoints(attempt, event(step))
            write_checkpoint(rundir.path_of(job.directory) / "job" / "checkpoints", step, b"good")
        (rundir.path_of(job.directory) / "job" / "checkpoints" / "step-200" / "COMMITTED").write_text(manifest)
        for _ in range(2):
            verify.verify_next()
        found = dict(Checkpoint.objects.values_list("step", "state"))
        assert found == {100: "verified", 200: "corrupt"}

    @pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE])
    def test_what_cannot_be_read_now_is_tried_later(
        self, job: Job, attempt: Attempt, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        on_disk(job)
        for step in (100, 200):
            note_checkpoints(attempt, event(step))
            write_checkpoint(rundir.path_of(job.directory) / "job" / "checkpoints", step, b"good")
        real = os.open

        def fail(path: Any, *args: Any, **options: Any) -> int:
            if str(path).endswith(".distcp"):
                raise OSError(number, os.strerror(number))
            return real(path, *args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", fail)
            verified = [verify.verify_next() for _ in range(3)]
        assert sorted(row.step for row in verified if row) == [100, 200]  # each in its turn, none twice
        assert set(Checkpoint.objects.values_list("state", "verify_tries")) == {("committed", 1)}
        Checkpoint.objects.update(verify_after=timezone.now())
        verify.verify_next()
        verify.verify_next()
        assert set(Checkpoint.objects.values_list("state", flat=True)) == {"verified"}

    def test_a_missing_checkpoint_has_time_to_be_reported(self, job: Job, attempt: Attempt) -> None:
        on_disk(job)
        write_checkpoint(rundir.path_of(job.directory) / "job" / "checkpoints", 300, b"good")
        for step in (100, 200):
            note_checkpoints(attempt, event(step))
        for _ in range(2):
            verify.verify_next()
        assert set(Checkpoint.objects.values_list("state", "verify_tries")) == {("committed", 1)}
        note_checkpoints(attempt, event(100, kind="checkpoint.pruned"))  # its report was late
        for _ in range(2):
            Checkpoint.objects.update(verify_after=timezone.now())
            verify.verify_next()
        found = {row.step: (row.state, row.problem) for row in Checkpoint.objects.all()}
        assert found == {100: ("pruned", ""), 200: ("corrupt", "Its folder is gone.")}

    def test_a_file_system_that_is_away_proves_nothing(
        self, job: Job, attempt: Attempt, settings: Any, tmp_path: Path
    ) -> None:
        on_disk(job)
        note_checkpoints(attempt, event(100))
        settings.VIGIL_RUNS = tmp_path / "unmounted"
        assert verify.verify_next() is not None
        assert verify.verify_next() is None
        assert Checkpoint.objects.get().state == "committed"


def write_checkpoint(folder: Path, step: int, data: bytes | None) -> None:
    """Write a checkpoint with "good" in its manifest, and with this content."""
    place = folder / f"step-{step}"
    place.mkdir(parents=True)
    if data is not None:
        (place / "__0_0.distcp").write_bytes(data)
    file = manifest.CheckpointFile("__0_0.distcp", 4, sha256(b"good").hexdigest())
    report = manifest.Manifest(
        step=step,
        generation=1,
        consumed_samples=1,
        world_size=1,
        layout={},
        config_hash="",
        files=(file,),
        created=1.7e9,
    )
    (place / manifest.COMMITTED).write_text(report.dump())
