"""Test releasing a job that the scheduler holds, by its owner: by button, over REST, and in whose name."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from jobs.following.held_jobs import releases
from jobs.models import Attempt, Job
from nodes.schedulers.base import SchedulerError
from portal.models import AuditEntry, User
from tests.jobs.following.launchers import newest
from tests.jobs.pages.reading import text
from tests.jobs.schedulers import ScriptedScheduler
from tests.lab import bearer, person, signed_in, sysadmin

pytestmark = pytest.mark.django_db


@pytest.fixture
def held_job(job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]) -> Job:
    scheduler.update_job("101", state="pending", reason="JobHeldUser")
    Attempt.objects.update(scheduler_user="oskar-s")
    tick()
    return job


def request_release(user: User, job: Job) -> Any:
    return bearer(user).post(f"/api/v1/jobs/{job.pk}/release")


def test_its_owner_releases_it_in_their_name(
    held_job: Job, scheduler: ScriptedScheduler, oskar: User, tick: Callable[[], bool]
) -> None:
    assert "Release it" in text(signed_in(oskar).get(f"/jobs/{held_job.pk}"))
    assert request_release(oskar, held_job).status_code == 202
    assert request_release(oskar, held_job).status_code == 202
    assert "Releasing" in text(signed_in(oskar).get(f"/jobs/{held_job.pk}"))
    assert not scheduler.released, "no request of a page calls the scheduler"
    tick()
    tick()
    assert scheduler.released == [("101", "oskar-s")]
    assert newest().release_requested_at is None


def test_a_sysadmin_releases_it_in_the_portals_name(
    held_job: Job, scheduler: ScriptedScheduler, tick: Callable[[], bool]
) -> None:
    """A hold by an administrator is not the owner's to end."""
    signed_in(sysadmin("ops")).post(f"/jobs/{held_job.pk}/release")
    tick()
    assert scheduler.released == [("101", "")]
    assert AuditEntry.objects.get().action == "job.released"


def test_the_schedulers_objection_is_shown(
    held_job: Job, scheduler: ScriptedScheduler, oskar: User, tick: Callable[[], bool]
) -> None:
    scheduler.broken_parts["release"] = SchedulerError("Access/permission denied", permanent=True)
    request_release(oskar, held_job)
    tick()
    assert newest().release_requested_at is None
    assert "Not released: Access/permission denied" in text(signed_in(oskar).get(f"/jobs/{held_job.pk}"))
    assert request_release(oskar, held_job).json()["attempt"]["release_outcome"] == ""


def test_a_silent_scheduler_is_tried_again_but_not_for_ever(
    held_job: Job, scheduler: ScriptedScheduler, oskar: User, tick: Callable[[], bool]
) -> None:
    scheduler.broken_parts["release"] = SchedulerError("Slurm did not answer for 10 s.")
    request_release(oskar, held_job)
    tick()
    assert newest().release_requested_at is not None
    Attempt.objects.update(release_requested_at=timezone.now() - releases.GIVE_UP - timedelta(seconds=1))
    tick()
    assert newest().release_requested_at is None


def test_refuses_jobs_that_are_not_held_and_strangers(
    job: Job, scheduler: ScriptedScheduler, oskar: User, tick: Callable[[], bool]
) -> None:
    assert request_release(oskar, job).status_code == 409, "it runs"
    scheduler.update_job("101", state="pending", reason="Resources")
    tick()
    assert request_release(oskar, job).status_code == 409
    assert "is not held" in request_release(oskar, job).json()["detail"]
    scheduler.update_job("101", state="pending", reason="JobHeldAdmin")
    tick()
    assert request_release(person("stranger"), job).status_code == 404
    assert not scheduler.released
