"""Test disk usage: what is counted, that links of jobs are not followed, when it is counted again, and who sees it."""

from __future__ import annotations

import os
import re
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.utils import timezone

from jobs.disk import rundir, sums, trash, usage
from jobs.models import Attempt, Checkpoint, Job
from tests import lab

pytestmark = pytest.mark.django_db
MB = 1_000_000


def a_job(project: str = "default", *, bytes: int = 0, state: str = "completed", **fields: Any) -> Job:
    """Create a job whose run directory has this size."""
    job = lab.a_job(lab.User.objects.filter(username="olga").first() or lab.person("olga"), lab.a_project(project),
                    state=state, **fields)  # fmt: skip
    lab.on_disk(job)
    write(job, "job/result.bin", bytes)
    return job


def write(job: Job, name: str, bytes: int) -> Path:
    path = rundir.path_of(job.directory) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(os.urandom(bytes))
    return path


def measured(job: Job) -> Job:
    usage.measure(job)
    job.refresh_from_db()
    return job


def test_everything_below_counts_and_once() -> None:
    job = a_job(bytes=MB)
    inner = write(job, "job/checkpoints/step-1/a.distcp", 2 * MB)
    os.link(inner, inner.with_name("again"))
    measured(job)
    assert 3 * MB <= job.disk_bytes < 3.1 * MB
    assert not job.disk_is_partial
    assert job.disk_measured_at


def test_nothing_that_a_job_planted_is_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "large").write_bytes(os.urandom(5 * MB))
    job = a_job(bytes=1000)
    folder = rundir.path_of(job.directory) / "job"
    (folder / "folder").symlink_to(outside)
    (folder / "file").symlink_to(outside / "large")
    (folder / "loop").symlink_to(folder)
    os.mkfifo(folder / "pipe")
    with (folder / "holes").open("wb") as holes:
        holes.truncate(1 << 40)
    measured(job)
    assert job.disk_bytes < MB
    assert not job.disk_is_partial


def test_link_in_place_of_the_run_directory_is_not_followed(tmp_path: Path) -> None:
    job = a_job()
    path = rundir.path_of(job.directory)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert measured(job).disk_bytes == 0
    assert job.disk_measured_at, "others get their turn"


def test_depth_and_number_are_bounded() -> None:
    job = a_job(bytes=MB)
    deep = rundir.path_of(job.directory) / "job"
    for _ in range(usage.MAX_DEPTH + 3):
        deep /= "d"
        deep.mkdir()
    assert measured(job).disk_is_partial
    assert job.disk_bytes >= MB
    with rundir.folder_under(rundir.runs_root(), job.directory) as folder:
        assert usage.size_of(folder, deadline=time.monotonic() + 60, most_entries=3).is_partial
        assert usage.size_of(folder, deadline=time.monotonic() - 1) == usage.DiskSize(0, True)
        descriptors = len(os.listdir("/proc/self/fd"))
        usage.size_of(folder, deadline=time.monotonic() + 60, most_entries=20)
        assert len(os.listdir("/proc/self/fd")) == descriptors, "none is left open"


def test_a_deleted_directory_takes_nothing_and_an_absent_file_system_changes_nothing(runs: Path) -> None:
    job = measured(a_job(bytes=MB))
    before = job.disk_bytes
    runs.rename(runs.with_name("away"))
    assert measured(job).disk_bytes == before
    runs.mkdir()
    assert measured(job).disk_bytes == before, "the folder that it is mounted on is there"
    runs.rmdir()
    runs.with_name("away").rename(runs)
    with trash.moved_to_trash(job.directory):
        pass
    assert measured(job).disk_bytes == 0


def test_measured_again_only_when_it_may_have_changed() -> None:
    ended, running = a_job(), a_job(state="running")
    assert usage.measure_due() == 2
    long_ago = timezone.now() - timedelta(days=1)
    Attempt.objects.filter(job=ended).update(ended_at=long_ago, closed_at=long_ago)
    assert usage.measure_due() == 0
    Job.objects.update(disk_measured_at=timezone.now() - usage.REMEASURE_AFTER - timedelta(seconds=1))
    assert list(usage.due()) == [running]
    assert usage.measure_due() == 1
    for what in ("ended_at", "closed_at", "spools_removed_at"):
        Attempt.objects.filter(job=ended).update(**{what: timezone.now()})
        assert list(usage.due()) == [ended]
        assert usage.measure_due() == 1
        Attempt.objects.filter(job=ended).update(**{what: long_ago})
    assert usage.measure_due() == 0


def test_round_ends_in_time_and_the_next_goes_on() -> None:
    jobs = [a_job() for _ in range(3)]
    assert usage.measure_due(budget_s=-1) == 0
    assert set(usage.due()) == set(jobs)
    assert usage.measure_due() == 3


def a_lab() -> tuple[Job, Job]:
    """Create two projects: heron holds more, half of it in a checkpoint."""
    large, small = a_job("heron", bytes=4 * MB), a_job("wren", bytes=MB)
    for name, state in (("step-1", "pruned"), ("step-2", "verified")):
        Checkpoint.objects.create(
            job=large, attempt=large.latest, step=1 if state == "pruned" else 2, name=name, generation=1, state=state,
            bytes=2 * MB, created_at=timezone.now(),
        )  # fmt: skip
    a_job("wren")  # not measured yet
    measured(large)
    measured(small)
    return large, small


def test_api_shows_leads_their_projects_and_sysadmins_all() -> None:
    a_lab()
    lead = lab.person("lea", lab.a_project("wren"), role="lead")
    member = lab.person("mia", lab.a_project("wren"))
    everything = lab.bearer(lab.sysadmin()).get("/api/v1/projects/disk").json()["items"]
    assert [item["project"] for item in everything][:2] == ["heron", "wren"]
    heron, wren = everything[:2]
    assert 4 * MB <= heron["bytes"] < 4.2 * MB
    assert (heron["jobs"], heron["checkpoint_bytes"], heron["unmeasured"], heron["partial"]) == (1, 2 * MB, 0, 0)
    assert (wren["jobs"], wren["unmeasured"]) == (2, 1)
    assert wren["oldest_job_at"]
    assert [i["project"] for i in lab.bearer(lead).get("/api/v1/projects/disk").json()["items"]] == ["wren"]
    assert lab.bearer(member).get("/api/v1/projects/disk").json()["items"] == []


def test_page_leads_with_who_holds_most_and_names_the_largest_jobs() -> None:
    large, small = a_lab()
    text = lab.signed_in(lab.sysadmin()).get("/disk").content.decode().replace("\N{NO-BREAK SPACE}", " ")
    assert "heron uses 4.0" in text
    assert "1 job is not measured yet" in text
    assert text.index(f"/jobs/{large.pk}/checkpoints") < text.index(f"/jobs/{small.pk}/checkpoints")
    lead = lab.signed_in(lab.person("lea", lab.a_project("wren"), role="lead"))
    text = lead.get("/disk").content.decode()
    assert "heron" not in text
    assert "wren uses 1.0" in text
    for path in ("/", "/me/", "/submit"):
        assert 'href="/disk"' in lead.get(path).content.decode()


def test_sums_of_many_jobs_are_cached_until_something_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    large, _ = a_lab()
    browser = lab.bearer(lab.sysadmin())

    def listed() -> list[tuple[Any, ...]]:
        items = browser.get("/api/v1/projects/disk").json()["items"]
        return [(item["project"], item["jobs"], item["bytes"], item["checkpoint_bytes"]) for item in items]

    exact = listed()
    monkeypatch.setattr(sums, "MAX_SUMMED_JOBS", 1)
    assert listed() == exact, "nothing is cached yet"
    now = timezone.now()
    assert sums.update(now) == 2
    assert listed() == exact
    assert sums.update(now + timedelta(minutes=5)) == 0, "nothing was measured since"
    Job.objects.filter(pk=large.pk).update(disk_bytes=9 * MB, disk_measured_at=now + timedelta(minutes=6))
    assert listed() == exact, "as last added up"
    assert sums.update(now + timedelta(minutes=7)) == 1, "its project alone"
    assert listed()[0] == ("heron", 1, 9 * MB, 2 * MB)
    Job.objects.filter(pk=large.pk).delete()
    assert sums.update(now + timedelta(hours=2)) == 2
    assert ("heron", 0, 0, 0) in listed()


def test_largest_are_those_of_your_projects() -> None:
    large, small = a_lab()
    sam = lab.sysadmin()
    assert usage.largest(sam) == [large, small]
    assert usage.largest(sam, most=1) == [large]
    assert usage.largest(lab.person("lea", lab.a_project("wren"), role="lead")) == [small]


def test_page_is_not_for_members() -> None:
    member = lab.signed_in(lab.person("mia", lab.a_project("wren")))
    assert member.get("/disk").status_code == 403
    for path in ("/", "/me/", "/submit"):
        assert 'href="/disk"' not in member.get(path).content.decode()


def test_page_does_not_repeat_itself() -> None:
    lab.a_project("wren")
    measured(a_job("heron", bytes=4 * MB))
    text = lab.signed_in(lab.sysadmin()).get("/disk").content.decode().replace("\N{NO-BREAK SPACE}", " ")
    assert re.search(r"heron uses all 4\.\d+ MB in 1 job\.", text)


def a_reported_checkpoint(job: Job, bytes: int) -> None:
    lab.a_checkpoint(job, 3, state="verified", bytes=bytes)


def test_checkpoints_of_which_nothing_lies_on_disk_are_in_no_sum() -> None:
    a_lab()
    a_reported_checkpoint(measured(a_job("heron", bytes=1000)), 164_000 * MB)
    browser = lab.signed_in(lab.sysadmin())
    text = browser.get("/disk").text.replace("\N{NO-BREAK SPACE}", " ")
    assert "164 GB" not in text.partition("</header>")[2]
    assert "% of that is checkpoints." in text


def test_more_checkpoints_reported_than_found_is_not_called_all_of_it() -> None:
    large, _ = a_lab()
    a_reported_checkpoint(large, 4 * MB)
    text = lab.signed_in(lab.sysadmin()).get("/disk").text.replace("\N{NO-BREAK SPACE}", " ")
    assert "All of that is checkpoints" not in text
    assert re.search(r"Its trainers reported 6\S* MB in checkpoints, more than was found when it was measured\.", text)


def test_page_before_anything_ran() -> None:
    lab.a_project()
    assert "No run directory uses disk space yet." in lab.signed_in(lab.sysadmin()).get("/disk").content.decode()


def test_page_before_anything_was_measured() -> None:
    lab.a_job(lab.person("mia", project := lab.a_project()), project, state="completed")
    job = Job.objects.get()
    job.directory = f"{project.slug}/1-abcdef"
    job.save()
    assert "being measured" in lab.signed_in(lab.sysadmin()).get("/disk").content.decode()


def test_listing_does_not_query_for_each_project(django_assert_max_num_queries: Any) -> None:
    for number in range(5):
        a_job(f"project-{number}")
    user = lab.sysadmin()
    with django_assert_max_num_queries(4):  # projects, whether their jobs are few, these, their checkpoints
        assert len(usage.disk_use(user)) == 5
