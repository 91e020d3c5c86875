"""Read pages in the form that tests need."""

import re
from html import unescape
from typing import Any

from jobs.models import Checkpoint, Job
from portal.models import User
from tests.lab import a_checkpoint, signed_in

_UNBROKEN = re.compile(r'<span class="nowrap">([^<]*)</span>')


def text(response: Any) -> str:
    """Return the page's HTML on one line, with plain spaces."""
    return unwrapped(response.content.decode())


def page_text(user: User, address: str, **headers: str) -> str:
    """Return the page, which must exist, as one line of text without entities, with plain spaces."""
    response = signed_in(user).get(address, headers=headers)
    assert response.status_code == 200, address
    return plain_text(response)


def plain_text(response: Any) -> str:
    """Return the response as one line of text without entities, with plain spaces."""
    return unwrapped(unescape(response.content.decode()))


def unwrapped(html: str) -> str:
    """Replace no-break spaces and unwrap names that may not break."""
    return " ".join(_UNBROKEN.sub(r"\1", html).replace("\N{NO-BREAK SPACE}", " ").split())


def save(job: Job, step: int, **fields: Any) -> Checkpoint:
    """Create a verified checkpoint of the job's latest attempt."""
    return a_checkpoint(job, step, **{"state": "verified", **fields})
