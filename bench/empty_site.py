"""Compare a site with a long history to an empty one: the follower's tick, ingesting reports, compaction.

Both sites exist at the same time, with a process on each, and take turns, so that other load on the machine affects
both alike; minutes apart, speeds may differ by half. Each does the same work, as often, on as many running attempts.
Measured is CPU time: ours, and that of the PostgreSQL process that serves us.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil

from bench import stage

ALIVE = 10  # attempts that run
TICKS, POSTS, TURNS = 8, 6, 9
OFTEN = 48  # what takes a millisecond or two: the kernel tells CPU time of others in steps of 10 ms
SECRET = "the attempt's own token"


def compare(history: stage.Site, empty: stage.Site) -> dict[str, dict[str, float]]:
    """Return for each action its lowest milliseconds on either site and the median of the ratios, turn by turn.

    Times below a millisecond count as one: their ratio means nothing.
    """
    with ExitStack() as stack:
        on = [stack.enter_context(_player(site)) for site in (history, empty)]
        for play in on:
            play()  # what a process does only once
        turns = [(on[0](), on[1]()) for _ in range(TURNS)]
    found = {}
    for what in turns[0][0]:
        with_history, empty_site = ([turn[site][what] for turn in turns] for site in (0, 1))
        ratios = [max(slower, 1.0) / max(other, 1.0) for slower, other in zip(with_history, empty_site, strict=True)]
        found[what] = {"with_history": min(with_history), "empty": min(empty_site), "ratio": statistics.median(ratios)}
    return found


@contextmanager
def _player(site: stage.Site) -> Iterator[Callable[[], dict[str, float]]]:
    """Run a process on this site; calling the result makes it take a turn."""
    command = [sys.executable, "-m", "bench.lists", "--turns"]
    environment = {**os.environ, **site.environment}
    child = subprocess.Popen(
        command, cwd=stage.REPOSITORY, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin
    assert child.stdout
    requests, answers = child.stdin, child.stdout

    def play() -> dict[str, float]:
        requests.write("go\n")
        requests.flush()
        found: dict[str, float] = json.loads(answers.readline())
        return found

    try:
        yield play
    finally:
        requests.close()  # its loop ends
        answers.close()
        child.wait()


def take_turns() -> None:
    """Be the process on a site: take one turn for each line read from stdin."""
    turn = _turns()
    for _ in sys.stdin:
        print(json.dumps(next(turn)), flush=True)


def spent() -> float:
    """Return the seconds of CPU used by this process and by the PostgreSQL process that serves it."""
    from django.db import connection

    if connection.vendor != "postgresql":
        return time.process_time()
    connection.ensure_connection()
    times = psutil.Process(connection.connection.info.backend_pid).cpu_times()
    return time.process_time() + times.user + times.system


def _turns() -> Iterator[dict[str, float]]:
    """Yield the milliseconds of CPU that each action takes once, again and again."""
    from jobs import tasks
    from jobs.disk import usage
    from jobs.following import follow
    from jobs.intake import reports
    from nodes.schedulers.base import JobStatus
    from portal.series import compact
    from tests.jobs.schedulers import ScriptedScheduler

    attempts = _attempts()
    ids = [attempt.pk for attempt in attempts]
    scheduler = ScriptedScheduler(
        {a.scheduler_id: JobStatus(scheduler_id=a.scheduler_id, state="running", key=a.key) for a in attempts}
    )

    seq = 0

    def post() -> None:
        nonlocal seq
        body = _body(seq)
        for pk in ids:
            reports.receive(pk, f"Bearer {SECRET}", "gzip", [body])
        seq += 1

    def merge() -> None:
        compact.compact(60, quiet=lambda owners: owners)

    while True:
        yield {
            "intake": _timed(post, POSTS) / len(ids),
            "compaction": _timed(merge, 1),
            "compaction where nothing is ripe": _timed(tasks.compact, OFTEN),
            "tick": _timed(lambda: follow.tick(scheduler), TICKS),
            "tick where nothing runs": _timed(follow.is_needed, OFTEN),
            "verify": _timed(tasks.verify, OFTEN),
            "measure": _timed(usage.measure_due, TICKS),
            "remove spools": _timed(tasks.remove_spools, OFTEN),
            "remove checkpoints": _timed(tasks.remove_checkpoints, OFTEN),
        }


def end_all() -> None:
    """End the few attempts of the history that run: the follower would poll them too."""
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
    """Return the milliseconds of CPU that each action takes."""
    began = spent()
    for _ in range(times):
        done()
    return (spent() - began) * 1e3 / times
