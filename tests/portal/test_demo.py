"""The demonstration lab: made once, whole, and told by the same rules as real jobs."""

from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

from jobs.models import Attempt, Checkpoint, Job
from portal import accounts
from portal.demo import lab
from portal.demo.stories import LIVE, STORIES
from portal.models import Chunk, User

pytestmark = pytest.mark.django_db


@pytest.fixture
def made(settings: Any, tmp_path: Path) -> list[str]:
    settings.VIGIL_RUNS = tmp_path
    accounts.first_start()
    return lab.make()


def test_is_made_once(made: list[str]) -> None:
    assert len(made) == len(STORIES) + len(LIVE)
    chunks, users = Chunk.objects.count(), User.objects.count()
    call_command("demo")
    assert (Job.objects.count(), Chunk.objects.count(), User.objects.count()) == (len(made), chunks, users)


def test_past_jobs_are_over_and_nothing_waits_for_the_follower(made: list[str]) -> None:
    past = Attempt.objects.filter(job__name__in=[story.name for story in STORIES])
    assert past.filter(ended_at=None).count() == 0
    assert past.filter(closed_at=None).count() == 0
    assert past.filter(decided_at=None).count() == 0
    assert not Checkpoint.objects.filter(state=Checkpoint.State.COMMITTED).exists(), "nothing to verify on disk"
    for attempt in past:
        assert attempt.created_at <= attempt.started_at <= attempt.ended_at  # type: ignore[operator]


def test_every_step_of_a_story_is_there(made: list[str]) -> None:
    for story in STORIES:
        latest = Job.objects.get(name=story.name).latest
        assert latest is not None
        assert (latest.step, latest.steps) == (story.tries[-1].last_step, story.steps)
        assert latest.latest["loss"]


def test_a_restarted_job_goes_on_from_its_checkpoint(made: list[str]) -> None:
    job = Job.objects.get(name="gpt-760m-context-4k")
    first, second = job.attempts.order_by("number")  # type: ignore[attr-defined]
    assert (first.state, second.state) == ("node_fail", "completed")
    assert second.resume_from is not None
    assert second.resume_from.step == 3000
    assert second.resume_from.attempt == first


def test_logs_lie_where_pages_look(made: list[str], tmp_path: Path) -> None:
    job = Job.objects.get(name="gpt-760m-batch-1024")
    log = tmp_path / job.directory / "job" / "attempt-1" / "logs" / "0.0.log"
    assert "OutOfMemoryError" in log.read_text()


def test_live_jobs_are_real_and_due(made: list[str]) -> None:
    waiting = Attempt.objects.filter(job__tags__name="live", state="pending", scheduler_id="")
    assert waiting.count() == len(LIVE)
