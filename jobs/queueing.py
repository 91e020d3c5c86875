"""Queue a task of jobs by its name, so that modules below `jobs.tasks` need not import it.

A queued task only makes work happen sooner: work that is due is stored in the database, and the next tick finds it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from portal.queueing import send

TaskName = Literal[
    "jobs.tasks.submit",
    "jobs.tasks.follow",
    "jobs.tasks.diagnose",
    "jobs.tasks.replay",
    "jobs.tasks.empty_trash",
]
EXPIRES_S: Mapping[TaskName, float] = {
    "jobs.tasks.submit": 60,
    "jobs.tasks.follow": 2,
    "jobs.tasks.diagnose": 60,
    "jobs.tasks.replay": 60,
    "jobs.tasks.empty_trash": 600,
}
"""A worker drops a message older than this: by then a tick has done the work."""


def queue(name: TaskName, *args: int, countdown: float | None = None) -> None:
    """Have a worker run the task soon, or after `countdown` seconds. Never raises for a broker that is down."""
    send(name, args, expires_s=EXPIRES_S[name], countdown=countdown)
