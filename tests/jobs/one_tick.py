"""Run a follower in a separate process, for tests that stop it: `python -m tests.jobs.one_tick make|tick|take|show`.

`tick` polls a scheduler that answers only when a line arrives on stdin, so the test chooses the moment.
"""

from __future__ import annotations

import logging
import os
import sys

import django

os.environ["DJANGO_SETTINGS_MODULE"] = "portal.settings"
django.setup()
logging.disable(logging.WARNING)

from jobs import lease  # noqa: E402
from jobs.following import follow  # noqa: E402
from jobs.models import Attempt  # noqa: E402
from nodes.schedulers.base import JobStatus  # noqa: E402
from tests.jobs.schedulers import ScriptedScheduler  # noqa: E402
from tests.lab import a_job, a_project, sysadmin  # noqa: E402
from tests.waiting import until  # noqa: E402

lease.SECONDS = 1


class Slow(ScriptedScheduler):
    def status(self, scheduler_ids: list[str]) -> dict[str, JobStatus]:
        print("waiting", flush=True)
        sys.stdin.readline()
        return super().status(scheduler_ids)


def tick() -> None:
    follow.tick(Slow({"7": JobStatus(scheduler_id="7", state="running")}))


def take() -> None:
    until(lambda: lease.take("follow"), "the lease to be free")


def make() -> None:
    a_job(sysadmin(), a_project(), state="pending", attempt={"scheduler_id": "7"})


def show() -> None:
    print(Attempt.objects.get().state)


if __name__ == "__main__":
    {"make": make, "tick": tick, "take": take, "show": show}[sys.argv[1]]()
