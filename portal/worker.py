"""One worker process, for one queue: `follow` for what somebody waits for, `work` for the rest; `tail` reads spools.

    python -m portal.worker QUEUE [more of `celery worker`'s options]

One task at a time in the process itself: a pool's children would outlive a killed parent.
"""

from __future__ import annotations

import gc
import sys

gc.disable()  # nothing of what a worker loads is garbage, and looking for some is a tenth of its start

from celery.signals import worker_ready  # noqa: E402

from portal.celery import app  # noqa: E402

OPTIONS = ("--pool=solo", "--without-gossip", "--without-mingle", "--without-heartbeat", "--loglevel=INFO")


@worker_ready.connect
def collect_again(**about: object) -> None:
    gc.freeze()  # it stays loaded, so no later collection need look through it
    gc.enable()


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0].startswith("-"):
        sys.exit("a worker needs its queue: follow, work or tail")
    queue, *more = arguments
    app.worker_main(["--quiet", "worker", f"--queues={queue}", f"--hostname={queue}@%h", *OPTIONS, *more])


if __name__ == "__main__":
    main(sys.argv[1:])
