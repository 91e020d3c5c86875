"""What the follower's tick, taking in reports and compaction cost, so that it can be told before and after a history.

Each is done the same number of times, on the same number of attempts that run; counted is CPU time, ours and that of
PostgreSQL's process that answers us. Best of several rounds: what others do on the machine only ever adds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil

ALIVE = 10  # attempts that run
TICKS, POSTS, ROUNDS = 8, 6, 5
SECRET = "the attempt's own token"


def spent() -> float:
    """Seconds of CPU: ours, and those of PostgreSQL's process that answers us."""
    from django.db import connection

    if connection.vendor != "postgresql":
        return time.process_time()
    connection.ensure_connection()
    times = psutil.Process(connection.connection.info.backend_pid).cpu_times()
    return time.process_time() + times.user + times.system


def cost() -> dict[str, float]:
    """Milliseconds of CPU of one of each; rows it made go again."""
    from jobs import tasks
    from jobs.disk import usage
    from jobs.following import follow
    from jobs.intake import reports
    from jobs.models import Job
    from nodes.schedulers.base import JobStatus
    from portal.models import Series
    from portal.series import compact
    from tests.jobs.schedulers import Told

    attempts = _attempts()
    ids = [attempt.pk for attempt in attempts]
    told = Told({a.scheduler_id: JobStatus(scheduler_id=a.scheduler_id, state="running", key=a.key) for a in attempts})

    seq = 0

    def post() -> None:
        nonlocal seq
        body = _body(seq)
        for pk in ids:
            reports.receive(pk, f"Bearer {SECRET}", "gzip", [body])
        seq += 1

    def merge() -> None:
        compact.compact(60, quiet=lambda owners: owners)

    follow.tick(told)  # the first also learns of the nodes
    found: dict[str, float] = {"intake": min(_timed(post, POSTS) / len(ids) for _ in range(ROUNDS))}
    found["compaction"] = _timed(merge, 1)
    found["compaction where nothing is ripe"] = min(_timed(tasks.compact, TICKS) for _ in range(ROUNDS))
    for label, done in (
        ("tick", lambda: follow.tick(told)),
        ("tick where nothing runs", follow.is_needed),
        ("verify", tasks.verify),
        ("measure", usage.measure_due),
        ("remove spools", tasks.remove_spools),
        ("remove checkpoints", tasks.remove_checkpoints),
    ):
        done()
        found[label] = min(_timed(done, TICKS) for _ in range(ROUNDS))
    Series.objects.filter(owner_kind="attempt", owner_id__in=ids).delete()
    Job.objects.filter(pk__in=[attempt.job_id for attempt in attempts]).delete()
    return found


def end_all() -> None:
    """The few of the history that run would be asked for, too: they end."""
    from django.db.models import F

    from jobs.models import Attempt

    over = ("ended_at", "closed_at", "decided_at", "collected_at", "spools_removed_at", "slurm_steps_at")
    Attempt.objects.filter(ended_at=None).update(state="completed", **dict.fromkeys(over, F("created_at")))


def _attempts() -> list[Any]:
    from tests.jobs.reporting import attempt_of, job_of

    return [attempt_of(job_of(), secret=SECRET, scheduler_id=f"90{n}", directory="attempt-1") for n in range(ALIVE)]


def _body(seq: int) -> bytes:
    from bench import intake

    return intake._body(seq)


def _timed(done: Callable[[], object], times: int) -> float:
    """Milliseconds of CPU of each."""
    began = spent()
    for _ in range(times):
        done()
    return (spent() - began) * 1e3 / times
