"""Test that a waiting job reports a missing run directory, as after restoring the database alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from django.test import Client

from jobs.disk import rundir
from jobs.following.submission import handover
from jobs.models import Attempt, Job
from portal.models import User
from tests.jobs.following.submission.test_handover import newest, stalled
from tests.jobs.schedulers import ScriptedScheduler
from tests.jobs.submissions import submit_spec
from vigil_cli.tables import jobs as job_tables

pytestmark = pytest.mark.django_db


@pytest.fixture
def queued(oskar: User, scheduler: ScriptedScheduler) -> Job:
    """Return a job in the scheduler's queue."""
    job, _ = submit_spec(oskar)
    handover.hand_over(newest().pk, scheduler)
    Attempt.objects.update(reason="Priority")
    return Job.objects.get(pk=job.pk)


def rest(client: Client, job: Job) -> dict[str, Any]:
    answer = client.get(f"/api/v1/jobs/{job.pk}")
    assert answer.status_code == 200
    return dict(answer.json())


def test_page_rest_and_command_name_what_is_missing_and_the_remedy(client: Client, oskar: User, queued: Job) -> None:
    client.force_login(oskar)
    assert "missing" not in rest(client, queued)["explained"]
    root = rundir.path_of(queued.directory)
    shutil.rmtree(root)
    text = rest(client, queued)
    assert text["reason"] == "Priority", "the scheduler's word stays"
    assert text["explained"] == text["attempt"]["explained"]
    assert text["explained"].startswith(f"Its run directory {root} is missing")
    assert "Put it back from the backup of VIGIL_RUNS, or cancel this job and submit it again." in text["explained"]
    assert f"{root} is missing" in " ".join(job_tables.job(text))
    page = client.get(f"/jobs/{queued.pk}").content.decode()
    assert "It cannot start." in page
    assert "Put it back from the backup of VIGIL_RUNS" in page
    assert client.get(f"/api/v1/jobs/{queued.pk}/why").json()["text"].startswith("Its run directory")


def test_a_file_system_that_is_away_is_not_called_lost(client: Client, oskar: User, queued: Job, runs: Path) -> None:
    client.force_login(oskar)
    shutil.rmtree(rundir.path_of(queued.directory).parent)
    explained = rest(client, queued)["explained"]
    assert "Mount the file system of VIGIL_RUNS; the job then starts by itself." in explained
    assert "cancel" not in explained


def test_what_was_not_handed_over_yet_waits_and_explains_it(
    oskar: User, scheduler: ScriptedScheduler, runs: Path
) -> None:
    job, _ = submit_spec(oskar)
    (runs / "default").mkdir(exist_ok=True)
    Job.objects.filter(pk=job.pk).update(directory="default/1-aaaaaa")
    handover.hand_over(newest().pk, scheduler)
    assert (newest().state, newest().ended_at, newest().scheduler_id) == ("pending", None, "")
    assert newest().reason == (
        f"Not submitted yet: Its run directory {runs}/default/1-aaaaaa is missing, as after a restore of the database"
        " alone. Put it back from the backup of VIGIL_RUNS, or cancel this job and submit it again."
    )
    (runs / "default/1-aaaaaa/job").mkdir(parents=True)
    (runs / "default/1-aaaaaa/portal").mkdir()
    stalled(job)
    handover.hand_over(newest().pk, scheduler)
    assert newest().scheduler_id == "101"
