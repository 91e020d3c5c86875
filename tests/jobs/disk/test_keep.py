"""Test that a project keeps checkpoints for days after a job's end: which are removed, which never, who decides."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from jobs.disk import retention, rundir, trash
from jobs.models import Attempt, Checkpoint, Event, Job
from jobs.submitting import submit
from portal.models import AuditEntry, Project
from tests import lab

pytestmark = pytest.mark.django_db
DAYS = 30


@pytest.fixture
def project() -> Project:
    project = lab.a_project("heron")
    Project.objects.update(keep_checkpoints_days=DAYS)
    project.refresh_from_db()
    return project


def a_job(project: Project, *states: str, days_ago: float = DAYS + 1, **fields: Any) -> Job:
    """Create a job that ended so long ago, with a checkpoint in each of these states, oldest first, on one line."""
    owner = lab.User.objects.filter(username="olga").first() or lab.person("olga", project)
    then = timezone.now() - timedelta(days=days_ago)
    attempt = {"ended_at": then, "decided_at": then, "closed_at": then, **fields}
    job = lab.a_job(owner, project, state="failed", attempt=attempt)
    lab.on_disk(job)
    for number, state in enumerate(states or ("verified", "verified", "verified"), start=1):
        add(job, number, state)
    return job


def add(job: Job, number: int, state: str = "verified", **fields: Any) -> Checkpoint:
    name = f"step-{number}"
    folder = rundir.path_of(job.directory) / "job" / "checkpoints" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "COMMITTED").write_text("{}")
    given = {"generation": 1, "parent_step": number - 1 or None, "parent_generation": 1, "bytes": 100, **fields}
    return Checkpoint.objects.create(
        job=job, attempt=job.latest, step=number, name=name, state=state, created_at=timezone.now(), **given
    )


def left(job: Job) -> list[str]:
    """Return what is on disk, and check that the rows agree."""
    there = rundir.names_under(rundir.path_of(job.directory), "job/checkpoints")
    assert sorted(job.checkpoints.exclude(state="pruned").values_list("name", flat=True)) == there
    return there


def test_only_the_last_checkpoint_stays_and_what_went_is_recorded(project: Project) -> None:
    job = a_job(project)
    assert retention.remove_checkpoints() == 2
    assert left(job) == ["step-3"]
    report = Event.objects.filter(attempt=job.latest, kind="checkpoint.expired").values_list("data", flat=True)
    assert sorted(data["step"] for data in report) == [1, 2]
    assert {data["days"] for data in report} == {DAYS}
    entry = AuditEntry.objects.get(action="checkpoints.expired")
    assert entry.user is None
    assert "200 bytes" in entry.detail
    assert retention.remove_checkpoints() == 0
    trash.empty()
    assert list((rundir.runs_root() / trash.TRASH).iterdir()) == []


def test_it_can_be_resumed_afterwards(project: Project) -> None:
    job = a_job(project)
    retention.remove_checkpoints()
    job.refresh_from_db()
    attempt = submit.resume(job.owner, job)
    assert attempt.resume_from
    assert attempt.resume_from.name == "step-3"


def test_nothing_goes_before_its_days_have_passed_or_where_none_are_set(project: Project) -> None:
    fresh = a_job(project, days_ago=DAYS - 1)
    old = a_job(project, days_ago=1000)
    Project.objects.update(keep_checkpoints_days=None)
    assert retention.remove_checkpoints() == 0
    Project.objects.update(keep_checkpoints_days=DAYS)
    assert retention.remove_checkpoints() == 2
    assert len(left(fresh)) == 3
    assert len(left(old)) == 1


@pytest.mark.parametrize("unfinished", ["ended_at", "decided_at", "closed_at"])
def test_running_undecided_and_open_jobs_are_left_alone(project: Project, unfinished: str) -> None:
    job = a_job(project, **{unfinished: None})
    assert retention.remove_checkpoints() == 0
    assert len(left(job)) == 3


def test_every_attempt_must_be_over(project: Project) -> None:
    job = a_job(project)
    Attempt.objects.create(job=job, number=2, state="running", resume_from=job.checkpoints.get(step=1))
    assert retention.remove_checkpoints() == 0, "even if the job's row did not follow yet"
    assert len(left(job)) == 3


def test_pinned_ones_and_the_newest_verified_stay(project: Project) -> None:
    job = a_job(project, "verified", "verified", "committed", "committed", "corrupt")
    Checkpoint.objects.filter(step=1).update(pinned=True)
    assert retention.remove_checkpoints() == 2
    assert left(job) == ["step-1", "step-2", "step-4"], "4 is the newest, 2 is known to be good, 1 is pinned"


def test_newest_is_on_the_line_not_the_highest_step(project: Project) -> None:
    job = a_job(project)
    # The last attempt restarted from step 1 and reached step 2 again.
    first = job.latest
    assert first
    then = first.ended_at
    last = Attempt.objects.create(
        job=job,
        number=2,
        state="failed",
        resume_from=job.checkpoints.get(step=1),
        ended_at=then,
        decided_at=then,
        closed_at=then,
    )
    job.checkpoints.filter(step=2).update(name="step-2.g1")
    folder = rundir.path_of(job.directory) / "job" / "checkpoints"
    (folder / "step-2").rename(folder / "step-2.g1")
    job.latest = last
    job.save(update_fields=["latest"])
    add(job, 2, generation=2, parent_step=1)
    retention.remove_checkpoints()
    assert left(job) == ["step-2"]
    assert job.checkpoints.get(name="step-2").generation == 2


def test_where_nothing_can_be_resumed_nothing_goes(project: Project) -> None:
    job = a_job(project, "corrupt", "corrupt")
    assert retention.remove_checkpoints() == 0
    assert len(left(job)) == 2


def test_links_are_never_followed(project: Project, tmp_path: Path) -> None:
    treasure = tmp_path / "treasure"
    (treasure / "step-1").mkdir(parents=True)
    (treasure / "step-1" / "kept").write_text("x")
    item, whole = a_job(project), a_job(project)
    folder = rundir.path_of(item.directory) / "job" / "checkpoints"
    os.rename(folder / "step-1", folder / "elsewhere")
    (folder / "step-1").symlink_to(treasure / "step-1")
    folder = rundir.path_of(whole.directory) / "job" / "checkpoints"
    os.rename(folder, folder.with_name("elsewhere"))
    folder.symlink_to(treasure)
    retention.remove_checkpoints()
    trash.empty()
    assert (treasure / "step-1" / "kept").exists()
    assert whole.checkpoints.filter(state="pruned").count() == 0


def test_what_is_no_folder_leaves_the_trash_too(project: Project, tmp_path: Path) -> None:
    job = a_job(project)
    folder = rundir.path_of(job.directory) / "job" / "checkpoints"
    os.rename(folder / "step-1", tmp_path / "kept")
    (folder / "step-1").symlink_to(tmp_path / "kept")
    os.rename(folder / "step-2", tmp_path / "elsewhere")
    (folder / "step-2").write_bytes(b"as large as it likes")
    assert retention.remove_checkpoints() == 2
    trash.empty()
    assert list((rundir.runs_root() / trash.TRASH).iterdir()) == []
    assert (tmp_path / "kept" / "COMMITTED").exists()


def test_what_cannot_be_moved_stays_and_is_tried_again(
    project: Project, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job = a_job(project)
    with monkeypatch.context() as patched:
        patched.setattr(rundir.os, "rename", lambda *args, **options: (_ for _ in ()).throw(PermissionError(13, "no")))
        assert retention.remove_checkpoints() == 0
    assert "cannot be removed" in caplog.text
    assert len(left(job)) == 3
    assert retention.remove_checkpoints() == 2


def test_folder_that_is_gone_is_written_down_unless_all_are(project: Project, runs: Path) -> None:
    """A kill between the rename and the row leaves one folder missing; a file system that is away leaves none."""
    job = a_job(project)
    trash.discard_checkpoint(job.directory, "step-1")
    runs.rename(runs.with_name("away"))
    assert retention.remove_checkpoints() == 0
    assert not Checkpoint.objects.filter(state="pruned").exists()
    runs.with_name("away").rename(runs)
    assert retention.remove_checkpoints() == 2
    assert left(job) == ["step-3"]


def test_where_the_last_checkpoint_is_gone_nothing_goes(project: Project) -> None:
    """Somebody moved or removed it by hand: a restart can only use what is left."""
    job, other = a_job(project), a_job(project)
    folder = rundir.path_of(job.directory) / "job" / "checkpoints"
    (folder / "step-3").rename(folder.parent / "saved")
    (rundir.path_of(other.directory) / "job" / "checkpoints" / "step-3" / "COMMITTED").unlink()
    assert retention.remove_checkpoints() == 0
    assert rundir.names_under(folder, "") == ["step-1", "step-2"]
    assert len(left(other)) == 3


def test_names_that_lead_out_are_refused(project: Project) -> None:
    job = a_job(project)
    for name in ("..", "../..", "/etc", "a/b", ""):
        with pytest.raises((rundir.UnsafePath, ValueError)):
            trash.discard_checkpoint(job.directory, name)


# Who decides


def test_leads_and_sysadmins_set_it_over_rest(project: Project) -> None:
    lead, member = lab.person("lea", project, role="lead"), lab.person("mia", project)
    stranger = lab.person("stan")

    def patch(user: lab.User, body: Any) -> Any:
        return lab.send(lab.bearer(user), "patch", "/api/v1/projects/heron", body)

    assert patch(lead, {"keep_checkpoints_days": 7}).json() == {"keep_checkpoints_days": 7}
    assert patch(lab.sysadmin(), {"keep_checkpoints_days": None}).json() == {"keep_checkpoints_days": None}
    assert patch(member, {"keep_checkpoints_days": 7}).status_code == 403
    assert patch(stranger, {"keep_checkpoints_days": 7}).status_code == 404
    for body in (
        {"keep_checkpoints_days": 0},
        {"keep_checkpoints_days": 4000},
        {"keep_checkpoints_days": "x"},
        {},
        {"a": 1},
    ):
        assert patch(lead, body).status_code == 422, body
    assert (
        lab.send(lab.bearer(lead, "read"), "patch", "/api/v1/projects/heron", {"keep_checkpoints_days": 7}).status_code
        == 403
    )
    project.refresh_from_db()
    assert project.keep_checkpoints_days is None
    audit_entries = AuditEntry.objects.filter(action="project.keep_checkpoints").order_by("pk")
    assert [(entry.user.username, entry.detail) for entry in audit_entries if entry.user] == [
        ("lea", "7 days"),
        ("sam", "forever"),
    ]
    items = lab.bearer(member).get("/api/v1/projects").json()["items"]
    assert items[0]["keep_checkpoints_days"] is None


def test_leads_set_it_on_the_page(project: Project) -> None:
    a_job(project)
    lead = lab.signed_in(lab.person("lea", project, role="lead"))
    for typed in ("14", "", "0", "9999", "²", "9" * 5000, "0000019999999"):
        answer = lead.post("/disk/heron/keep", {"days": typed}, follow=True)
        assert answer.status_code == 200
        project.refresh_from_db()
        assert project.keep_checkpoints_days == (14 if typed == "14" else None), typed
    assert lab.signed_in(lab.person("mia", project)).post("/disk/heron/keep", {"days": "1"}).status_code == 403
    assert lab.signed_in(lab.person("stan")).post("/disk/heron/keep", {"days": "1"}).status_code == 404


def test_people_are_informed_on_the_page_of_checkpoints(project: Project) -> None:
    job = a_job(project)
    text = lab.signed_in(lab.sysadmin()).get(f"/jobs/{job.pk}/checkpoints").content.decode()
    assert "heron keeps only the last one from 30 days after the end." in text.replace("\N{NO-BREAK SPACE}", " ")


def test_other_jobs_are_not_read_one_by_one(project: Project, django_assert_max_num_queries: Any) -> None:
    for _ in range(5):
        a_job(project, "verified")
    with django_assert_max_num_queries(2):
        retention.remove_checkpoints()
