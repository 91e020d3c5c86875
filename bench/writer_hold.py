"""Measure how long one request keeps the database's writer: the worst legal request at every endpoint that writes.

    python -m bench.writer_hold [sqlite|postgres] [--only WORD …] [--times N]

Every request comes on top of a long history: a machine with 2,900 events of today, 20,000 older ones and 700 GPUs
that it had before, a job with 16,000 checkpoints, 40,000 events and 100,000 clients. A process of its own watches the
database meanwhile. On SQLite it asks for the writer in a loop (BEGIN IMMEDIATE without waiting), and the longest time
without success counts. On PostgreSQL, where writers wait only for each other's rows, another connection signs people in
and changes projects, and its longest wait counts; the longest transaction that wrote is printed beside it.

On a busy machine both figures contain the time that other processes took. So the longest transaction's processor time
in the bench's own process is printed too (on PostgreSQL without the server's), and `--times` repeats each post and
reports the smallest figures.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import multiprocessing
import os
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from django.conf import settings

from bench import stage, worst_posts, worst_requests
from bench.worst_requests import Case

BAR_MS = 250.0
EVENTS_TODAY, EVENTS_BEFORE, GPUS_BEFORE = 2_900, 20_000, 700
CHECKPOINTS, EVENTS, CLIENTS = 16_000, 40_000, 100_000
TELEMETRY, REPORTS = "telemetry", "reports"


def main(databases: Sequence[str], only: Sequence[str], times: int) -> int:
    print(stage.machine())
    bars, figures = {}, {}
    for database in databases:
        times_ms = stage.in_child("bench.writer_hold", "--one", database, "--only", *only, "--times", str(times))
        longest_hold, longest_wait = (
            max(times_ms[what], key=times_ms[what].__getitem__) for what in ("held", "waited")
        )
        print(f"  {database}, longest transaction that wrote ({longest_hold}): {times_ms['held'][longest_hold]:.0f} ms")
        text = f"{database}, longest wait of another writer ({longest_wait})"
        bars[database] = stage.bar(text, times_ms["waited"][longest_wait], BAR_MS, at_least=False, unit=" ms")
        figures[database] = times_ms
    return stage.result("writer_hold", bars=bars, **figures)


def measure(database: str, only: Sequence[str], times: int) -> int:
    """Send every request on one database; print by name how long the writer was held and waited for, in ms, as JSON."""
    held_ms: dict[str, float] = {}
    waited_ms: dict[str, float] = {}
    with stage.site(database) as place:
        stage.django(place)
        import portal.celery  # noqa: F401  (binds shared tasks to the site's broker)

        settings.ALLOWED_HOSTS = ["testserver"]  # Django's test client calls itself that
        used = _TransactionTimes()
        for endpoint, what, send in _cases(times):
            name = f"{endpoint}: {what}"
            if any(word in name for word in only or [""]):
                gc.collect()
                gc.freeze()  # a server does not have the history's rows in memory, which a collection would go through
                used.longest_ms = 0.0
                with watched(database, place) as watcher:
                    began = time.perf_counter()
                    answer = send()
                    took = (time.perf_counter() - began) * 1e3
                if not 200 <= answer < 300:
                    raise SystemExit(f"{name} was refused: {answer}")
                held_ms[name] = min(watcher.longest_ms, held_ms.get(name, math.inf))
                waited_ms[name] = min(watcher.waited_ms, waited_ms.get(name, math.inf))
                figures = f"{watcher.longest_ms:8.0f} ms held, {used.longest_ms:6.0f} ms of processor, {took:8.0f} ms"
                others = f"another writer waited {watcher.waited_ms:4.0f} ms"
                print(f"  {figures} in all, {others}  {answer}  {name}", flush=True)
    print(json.dumps({"held": held_ms, "waited": waited_ms}))
    return 0


class _TransactionTimes:
    """Measure the processor time of this thread in the longest transaction of Django's connection."""

    longest_ms = 0.0

    def __init__(self) -> None:
        from django.db import connection

        self._began = 0.0
        self._set_autocommit, self._commit = connection.set_autocommit, connection.commit
        connection.set_autocommit = self._begin  # type: ignore[method-assign,assignment]
        connection.commit = self._end  # type: ignore[method-assign]

    def _begin(self, autocommit: bool, **options: Any) -> None:
        self._set_autocommit(autocommit, **options)
        self._began = time.thread_time()

    def _end(self) -> None:
        self._commit()
        self.longest_ms = max(self.longest_ms, (time.thread_time() - self._began) * 1e3)


class _Watcher:
    """Measure how long the writer was held at most, and how long another writer waited."""

    longest_ms = waited_ms = 0.0


@contextmanager
def watched(database: str, place: stage.Site) -> Iterator[_Watcher]:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    where = place.environment.get("DATABASE_URL") or str(place.home / "vigil.sqlite3")
    watch = _watch_sqlite if database == "sqlite" else _watch_postgres
    child = multiprocessing.get_context("spawn").Process(target=watch, args=(where, theirs), daemon=True)
    child.start()
    ours.recv()
    found = _Watcher()
    try:
        yield found
    finally:
        ours.send(None)
        found.longest_ms, found.waited_ms = (seconds * 1e3 for seconds in ours.recv())
        child.join(10)


def _watch_sqlite(path: str, pipe: Connection) -> None:
    connection = sqlite3.connect(path, timeout=0, isolation_level=None)
    longest, since = 0.0, time.perf_counter()
    pipe.send("ready")
    while not pipe.poll(0.001):
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
            since = time.perf_counter()
        except sqlite3.OperationalError:
            longest = max(longest, time.perf_counter() - since)
    pipe.send((longest, longest))


def _watch_postgres(url: str, pipe: Connection) -> None:
    import psycopg

    longest, stop, waited = 0.0, threading.Event(), [0.0]
    other = threading.Thread(target=_write_meanwhile, args=(url, stop, waited), daemon=True)
    other.start()
    with psycopg.connect(url, autocommit=True) as connection:
        pipe.send("ready")
        while not pipe.poll(0.002):
            row = connection.execute(
                "SELECT extract(epoch FROM max(clock_timestamp() - xact_start)) FROM pg_stat_activity"
                " WHERE backend_xid IS NOT NULL AND backend_type = 'client backend' AND pid <> pg_backend_pid()"
                " AND datname = current_database()"
            ).fetchone()
            longest = max(longest, float(row[0] or 0.0) if row else 0.0)
    stop.set()
    other.join(10)
    pipe.send((longest, waited[0]))


def _write_meanwhile(url: str, stop: threading.Event, waited: list[float]) -> None:
    """Sign people in and change projects until told to stop; note the longest time that one such write took."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        while not stop.wait(0.005):
            began = time.perf_counter()
            connection.execute("UPDATE portal_user SET last_login = now()")
            connection.execute("UPDATE portal_project SET title = title")
            waited[0] = max(waited[0], time.perf_counter() - began)


def _cases(times: int) -> Iterator[Case]:
    yield from _telemetry_cases(times)
    yield from _report_cases(times)
    yield from worst_requests.cases()


def _telemetry_cases(times: int) -> Iterator[Case]:
    from django.test import Client

    from nodes.models import Agent, AgentStream, NodeEvent

    agent, token = _machine()
    newest = NodeEvent.objects.latest("pk")
    client = Client(headers={"Authorization": f"Bearer {token}", "Content-Encoding": "gzip"})
    now = time.time()
    for what, body in worst_posts.telemetry_bodies(now):

        def send(body: dict[str, Any] = body) -> int:
            before = AgentStream.objects.filter(agent=agent).values_list("next_seq", flat=True).first() or 0
            post = worst_posts.packed(worst_posts.telemetry_post("0123456789abcdef", before, body["batches"], now))
            path = f"/api/v1/nodes/{agent.node}/telemetry"
            return client.post(path, post, content_type="application/json").status_code

        for _ in range(times):
            yield TELEMETRY, what, send
            Agent.objects.filter(pk=agent.pk).update(kernel_seq=-1)
            NodeEvent.objects.filter(pk__gt=newest.pk).delete()  # else the limit of a day would leave out the next


def _report_cases(times: int) -> Iterator[Case]:
    from django.test import Client

    from jobs.models import Checkpoint, Event, PendingRoundEvent
    from tests.jobs.reporting import SECRET

    attempt = _attempt()
    client = Client(headers={"Authorization": f"Bearer {SECRET}", "Content-Encoding": "gzip"})
    path, posts = f"/api/v1/attempts/{attempt.pk}/reports", itertools.count()

    def send(body: dict[str, Any]) -> int:
        for stream in body["streams"]:
            stream["id"] = f"{next(posts):016x}"
        return client.post(path, worst_posts.packed(body), content_type="application/json").status_code

    for what, body in worst_posts.report_bodies(time.time()):
        for _ in range(times):
            yield REPORTS, what, partial(send, body)
            if "checkpoint" in what:
                Checkpoint.objects.filter(step__gte=CHECKPOINTS).delete()
                Checkpoint.objects.filter(job=attempt.job_id).update(state="committed")
            PendingRoundEvent.objects.all().delete()  # for which the post had no time: like those that it applied
            Event.objects.filter(attempt=attempt).delete()  # else the limit of an attempt would leave out the next


def _machine() -> tuple[Any, str]:
    """Create a machine with a long history; return it and its agent's token."""
    from django.utils import timezone

    from nodes.models import Agent, Gpu, NodeEvent
    from nodes.telemetry.enrolment import enroll_here

    token = enroll_here("dgx-01")
    agent, now = Agent.objects.get(node="dgx-01"), timezone.now()
    gpus = [Gpu(uuid=f"GPU-old-{i}", agent=agent, index=i % 64, gone_at=now) for i in range(GPUS_BEFORE)]
    Gpu.objects.bulk_create(gpus, batch_size=500)
    ages = [timedelta(seconds=i) for i in range(EVENTS_TODAY)]
    ages += [timedelta(days=2, minutes=15 * i) for i in range(EVENTS_BEFORE)]
    NodeEvent.objects.bulk_create(
        [
            NodeEvent(
                agent=agent, kind="xid", code=63, text=f"row {i}", at=now - age, last_at=now - age,
                fingerprint=f"{i % 500:024x}", boot_id="b", first_seq=10_000 + i, last_seq=10_000 + i,
            )
            for i, age in enumerate(ages)
        ],
        batch_size=500,
    )  # fmt: skip
    return agent, token


def _attempt() -> Any:
    """Create a federated attempt with a long history."""
    from django.utils import timezone

    from jobs.models import Attempt, Checkpoint, Client, Event, Job
    from tests.jobs.reporting import attempt_of, job_of

    job, now = job_of(), timezone.now()
    Job.objects.filter(pk=job.pk).update(kind="federated")
    job.refresh_from_db()
    attempt = attempt_of(job, number=2, origin=Attempt.Origin.REQUEUED)
    Checkpoint.objects.bulk_create(
        [
            Checkpoint(job=job, attempt=attempt, step=i, name=f"step-{i}", generation=1, created_at=now)
            for i in range(CHECKPOINTS)
        ],
        batch_size=500,
    )
    earlier = attempt_of(job, number=1, secret="another")
    Job.objects.filter(pk=job.pk).update(latest=attempt)
    kinds = ("checkpoint.pruned", "custom", "run.started", "ranks.ended", "checkpoint.pruned")
    Event.objects.bulk_create(
        [
            Event(
                attempt=earlier,
                time=now,
                kind=kinds[i % 5],
                data={"step": 10**8 + i, "generation": 1, "text": "x" * 200},
            )
            for i in range(EVENTS)
        ],
        batch_size=500,
    )
    Client.objects.bulk_create([Client(job=job, number=i) for i in range(CLIENTS)], batch_size=500)
    return attempt


if __name__ == "__main__":
    os.environ.setdefault("VIGIL_LOCAL_TRUST", "everyone")
    parser = argparse.ArgumentParser("bench.writer_hold")
    parser.add_argument("databases", nargs="*", default=["sqlite", "postgres"])
    parser.add_argument("--only", nargs="*", default=[], help="cases whose names have one of these words")
    parser.add_argument("--times", type=int, default=1, help="how often each post is sent; the smallest figure counts")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        sys.exit(measure(options.one, options.only, options.times))
    sys.exit(main(options.databases, options.only, options.times))
