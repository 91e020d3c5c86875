"""Read pages in the form that tests need."""

from typing import Any

from jobs.models import Checkpoint, Job
from tests.lab import a_checkpoint


def text(response: Any) -> str:
    """Return the page's text on one line, with plain spaces."""
    return " ".join(response.content.decode().replace("\N{NO-BREAK SPACE}", " ").split())


def save(job: Job, step: int, **fields: Any) -> Checkpoint:
    """Create a verified checkpoint of the job's latest attempt."""
    return a_checkpoint(job, step, **{"state": "verified", **fields})
