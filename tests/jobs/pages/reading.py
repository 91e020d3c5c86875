"""Read pages in the form that tests need."""

import re
from typing import Any

from jobs.models import Checkpoint, Job
from tests.lab import a_checkpoint

_UNBROKEN = re.compile(r'<span class="nowrap">([^<]*)</span>')


def text(response: Any) -> str:
    """Return the page's HTML on one line, with plain spaces."""
    return on_one_line(response.content.decode())


def on_one_line(html: str) -> str:
    """Replace no-break spaces and unwrap names that are kept on one line."""
    return " ".join(_UNBROKEN.sub(r"\1", html).replace("\N{NO-BREAK SPACE}", " ").split())


def save(job: Job, step: int, **fields: Any) -> Checkpoint:
    """Create a verified checkpoint of the job's latest attempt."""
    return a_checkpoint(job, step, **{"state": "verified", **fields})
