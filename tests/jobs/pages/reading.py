"""Reading a page as a test wants it."""

from typing import Any

from django.utils import timezone

from jobs.models import Checkpoint, Job


def text(response: Any) -> str:
    """The page on one line, with plain spaces."""
    return " ".join(response.content.decode().replace("\N{NO-BREAK SPACE}", " ").split())


def save(job: Job, step: int, **fields: Any) -> Checkpoint:
    """A checkpoint of the job's latest attempt."""
    assert job.latest
    given = {"name": f"step-{step}", "generation": 1, "created_at": timezone.now(), "state": "verified", **fields}
    return Checkpoint.objects.create(job=job, attempt=job.latest, step=step, **given)
