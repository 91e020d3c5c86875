"""Test the sentence on why an attempt ended: an error, or else the exit code with the last output as context."""

from __future__ import annotations

import html
from collections.abc import Callable

import pytest
from django.test import Client

from jobs.models import Job
from portal.models import User
from tests.jobs.following.launchers import launched, newest
from tests.jobs.schedulers import ScriptedScheduler

pytestmark = pytest.mark.django_db


def test_a_program_that_just_leaves_is_not_reported_as_raising(
    job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    scheduler.update_job("101", state="running")
    left = {"rank": 0, "incarnation": 0, "kind": "exception", "exit_code": 3, "error": ""}
    launched(newest(), exit_code=3, cause="failed", first_failure=left)
    scheduler.update_job("101", state="failed", exit_code=3)
    tick()
    assert newest().reason == "Rank 0 ended with exit code 3 and printed no error."


def test_the_last_output_of_a_script_is_labelled_and_not_its_reason(
    client: Client, oskar: User, job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    scheduler.update_job("101", state="running")
    lines = ["epoch 3", "saved to /data/out with --password hunter2", 7, "x" * 9000]
    left = {"rank": 0, "incarnation": 0, "kind": "exception", "exit_code": 3, "error": "", "last_lines": lines}
    launched(newest(), exit_code=3, cause="failed", first_failure=left)
    scheduler.update_job("101", state="failed", exit_code=3)
    tick()
    text = "Rank 0 ended with exit code 3. Its log names no error and ends with: epoch 3 / saved to /data/out"
    assert newest().reason.startswith(text)
    assert "hunter2" not in str(newest().failure)
    assert len(newest().reason) < 600
    client.force_login(oskar)
    assert text in html.unescape(client.get(f"/jobs/{job.pk}").content.decode())
    assert client.get(f"/api/v1/jobs/{job.pk}").json()["explained"].startswith(text)
