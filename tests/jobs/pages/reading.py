"""Reading a page as a test wants it."""

from typing import Any

from jobs.models import Checkpoint, Job
from tests.lab import a_checkpoint


def text(response: Any) -> str:
    """The page on one line, with plain spaces."""
    return " ".join(response.content.decode().replace("\N{NO-BREAK SPACE}", " ").split())


def save(job: Job, step: int, **fields: Any) -> Checkpoint:
    """A checkpoint of the job's latest attempt, looked through."""
    return a_checkpoint(job, step, **{"state": "verified", **fields})
