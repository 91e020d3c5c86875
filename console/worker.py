"""Run one worker process for one queue.

`follow` is for work that somebody waits for, `diagnose` for logs of failed jobs, `work` for the rest; `tail` reads
spools, `pull` queries dcgm-exporters. `send` sends notifications; `diagnose` also does that between two failures, so
a separate `send` process is only for sites with many receivers.

    python -m console.worker QUEUE [more of `celery worker`'s options]

It runs one task at a time in the process itself: a pool's children would outlive a killed parent. Celery's own command
line is only loaded if more of its options are given: it imports an interactive shell, a third of a worker's imports.
"""

from __future__ import annotations

import gc
import os
import sys
from contextlib import suppress
from typing import Any

gc.disable()  # nothing loaded at start is garbage, and collecting takes a tenth of it
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "portal.settings")

import django  # noqa: E402
from celery.signals import (  # noqa: E402
    task_postrun,
    task_prerun,
    worker_ready,
    worker_shutdown,
    worker_shutting_down,
)
from celery.utils.nodenames import host_format  # noqa: E402
from redis.exceptions import RedisError  # noqa: E402

from portal.celery import app  # noqa: E402
from portal.run.heartbeat import Pulse  # noqa: E402
from portal.ticks import TICK  # noqa: E402

django.setup()

from django.db import close_old_connections  # noqa: E402

from console.health import heartbeats  # noqa: E402
from console.site import migrations  # noqa: E402

EXTRA_QUEUES = {"diagnose": ["send"]}
"""Additional, rarely used queues of a worker."""
OPTIONS = ("--pool=solo", "--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=INFO")


@worker_ready.connect
def resume_garbage_collection(**about: object) -> None:
    gc.freeze()  # it stays loaded, so later collections need not traverse it
    gc.enable()


@worker_ready.connect
def stop_waiting_on_shutdown(sender: Any, **about: object) -> None:
    """End a blocking wait for tasks on shutdown; otherwise the worker would stay until the wait times out."""

    def end_wait(**about: object) -> None:
        handshake = sender.task_consumer.channel.client.connection.handshake_metadata or {}
        # Nothing to unblock if the broker is gone.
        with suppress(RedisError, KeyError), app.connection_for_write() as connection:
            connection.default_channel.client.client_unblock(handshake[b"id"])

    worker_shutting_down.connect(
        end_wait, weak=False, dispatch_uid="end_wait"
    )  # worker_ready repeats after a broker's restart


@task_prerun.connect
@task_postrun.connect
def keep_connections(**about: object) -> None:
    """Close broken or expired database connections around a task, as Django does around a request."""
    close_old_connections()


class WorkerLiveness:
    """Publish this worker's signs of life: a file for its supervisor, a database row for everybody else."""

    def __init__(self, queue: str) -> None:
        self.pulse, self.is_ticked = Pulse(), False
        self.reporter = heartbeats.HeartbeatReporter(queue, self.activity, self.take_tick)
        task_prerun.connect(self.begin, weak=False)
        task_postrun.connect(self.end, weak=False)
        worker_shutdown.connect(self.stop, weak=False)
        self.pulse.start()
        self.reporter.start()

    def begin(self, task: Any = None, **about: object) -> None:
        self.pulse.begin(task.name if task else "")
        self.is_ticked |= bool(task and (task.request.headers or {}).get(TICK))

    def end(self, **about: object) -> None:
        self.pulse.end()

    def stop(self, **about: object) -> None:
        self.reporter.stopped.set()
        heartbeats.remove(self.reporter.role)

    def activity(self) -> heartbeats.Activity:
        return heartbeats.Activity(self.pulse.is_alive_by_progress(), *self.pulse.task)

    def take_tick(self) -> bool:
        """Return whether a scheduled task has come since the last call."""
        ticked, self.is_ticked = self.is_ticked, False
        return ticked


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0].startswith("-"):
        sys.exit("a worker needs its queue: follow, work, diagnose, send, tail or pull")
    queue, *more = arguments
    queues = [queue, *EXTRA_QUEUES.get(queue, ())]
    migrations.migrate_older_database()
    if queue == "follow":  # imported before the first task comes, as somebody waits for it
        from jobs.following import follow  # noqa: F401
        from jobs.following.submission import handover  # noqa: F401
    WorkerLiveness(queue)
    if more:
        app.worker_main(
            ["--quiet", "worker", f"--queues={','.join(queues)}", f"--hostname={queue}@%h", *OPTIONS, *more]
        )
        return
    worker = app.Worker(
        queues=queues,
        hostname=host_format(f"{queue}@%h"),
        pool_cls="solo",
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        loglevel="INFO",
        quiet=True,
    )
    worker.start()
    sys.exit(worker.exitcode)


if __name__ == "__main__":
    main(sys.argv[1:])
