"""Measure /reliability over a year of 100,000 attempts: p95 of each window and grouping, on SQLite and PostgreSQL.

    python -m bench.reliability [sqlite|postgres] [--attempts 100000] [--large]

Bar: p95 ≤ 300 ms each. The attempts of 1 to 16 of 250 nodes, a fifth of which failed, are rows, and counted as a
portal counts them; the time of that is printed too. 5,000 more are open. The pages are requested by a sysadmin and,
with the setting that shows people only the numbers of their own projects, by a member of ten. `--large`, which no bar
is held against: what a lab of 1,000 nodes and thirty times the attempts would have, written as sums and failures at
once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from itertools import islice
from typing import Any

from bench import stage

ATTEMPTS, DAYS = 100_000, 365
NODES, LARGE_NODES, LARGE_FAILURES = 250, 1_000, 600_000
PROJECTS, MEMBERSHIPS, OPEN, AT_ONCE = 30, 10, 5_000, 2_000
PARTITIONS = ("h100", "a100", "debug")
CAUSES = ("gpu.ecc", "network.fabric", "scheduler.node_fail", "program.exception", "memory.gpu_oom", "unknown")
TIMES = 20
BAR_MS = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.reliability")
    parser.add_argument("databases", nargs="*", default=["sqlite", "postgres"])
    parser.add_argument("--attempts", type=int, default=ATTEMPTS)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--one", action="store_true")
    options = parser.parse_args()
    if options.one:
        return _measure(options.databases[0], options.attempts, options.large)
    print(stage.machine())
    bars: dict[str, bool] = {}
    figures: dict[str, Any] = {}
    for database in options.databases:
        more = ["--large"] if options.large else []
        found = stage.in_child("bench.reliability", database, "--attempts", str(options.attempts), "--one", *more)
        print(f"\n{database}, {found['held']:,} rows of held nodes, {found['failures']:,} failures")
        for address, p95 in found["p95_ms"].items():
            print(f"  {address:64} {p95:7.1f} ms")
        worst = max(found["p95_ms"].values())
        print(f"  the dearest: {found['cpu_ms']:.0f} ms of the web process's CPU time")
        figures[database] = {"worst_p95_ms": worst, "counted_a_second": found["counted_a_second"]}
        if not options.large:
            print(f"  counted {found['counted_a_second']:,.0f} attempts a second")
            bars[f"{database}_p95"] = stage.bar(f"{database}, worst p95", worst, BAR_MS, at_least=False, unit=" ms")
    return stage.result("reliability", bars=bars, attempts=options.attempts, **figures)


def _measure(database: str, attempts: int, large: bool) -> int:
    with stage.site(database) as place:
        os.environ.update(place.environment)
        import console.asgi  # noqa: F401  (as the web process: everything loaded)
        from jobs.models import Failure, ProjectNodeHeld

        sam, mira, projects = _people()
        counted = 0.0
        if large:
            _make_sums(projects)
        else:
            _make_attempts(sam, projects, attempts)
            counted = attempts / _count()
        _make_attempts(sam, projects, OPEN, is_open=True)
        _analyze()
        there = {"held": ProjectNodeHeld.objects.count(), "failures": Failure.objects.count()}
        p95, cpu_ms = _p95(sam, mira)
        print(json.dumps({"p95_ms": p95, "cpu_ms": cpu_ms, "counted_a_second": counted, **there}))
        return 0


def _people() -> tuple[Any, Any, list[Any]]:
    """Create a sysadmin and a member of some of the projects; return them and the projects."""
    from nodes.models import RackPlace
    from portal.models import Membership, Project, User

    racks = [RackPlace(node=f"n{n:04}", rack=f"R{n // 16:02}") for n in range(LARGE_NODES)]
    RackPlace.objects.bulk_create(racks)
    projects = [Project.objects.create(slug=f"project-{n:02}") for n in range(PROJECTS)]
    mira = User.objects.create(username="mira")
    Membership.objects.bulk_create(Membership(user=mira, project=project) for project in projects[:MEMBERSHIPS])
    return User.objects.create(username="sam", is_superuser=True), mira, projects


def _make_attempts(owner: Any, projects: list[Any], attempts: int, *, is_open: bool = False) -> None:
    """Create a year of attempts, or those that run, for up to ten days."""
    from jobs.models import Attempt, Incident, Job

    chance = random.Random(14)
    now = datetime.now(UTC)
    left = iter(range(attempts))
    while numbers := list(islice(left, AT_ONCE)):
        specs = [{"resources": {"partition": chance.choice(PARTITIONS), "gpus_per_node": 8}} for _ in numbers]
        jobs = Job.objects.bulk_create(
            Job(
                project=chance.choice(projects), owner=owner, name=f"run-{n}", kind="distributed", spec=spec,
                spec_toml="",
            )
            for n, spec in zip(numbers, specs, strict=True)
        )  # fmt: skip
        made = []
        for n, job in zip(numbers, jobs, strict=True):
            began = now - timedelta(days=(10 if is_open else DAYS) * (1 - n / attempts), hours=1)
            ended = None if is_open else min(now, began + timedelta(hours=chance.expovariate(1 / 6)))
            first, several = chance.randrange(NODES), chance.choice((1, 1, 1, 2, 4, 16))
            made.append(
                Attempt(
                    job=job, number=1, state="running" if is_open else "completed",
                    nodes=[f"n{(first + k) % NODES:04}" for k in range(several)], submitted_at=began,
                    started_at=began, ended_at=ended, closed_at=ended, decided_at=ended, slurm_steps_at=ended,
                    spools_removed_at=ended,
                )
            )  # fmt: skip
        failed = [
            attempt for attempt in Attempt.objects.bulk_create(made) if attempt.ended_at and chance.random() < 0.2
        ]
        Incident.objects.bulk_create(
            Incident(
                attempt=attempt, project_id=attempt.job.project_id, at=attempt.ended_at or now, version=1,
                is_final=True,
                cause=chance.choice(CAUSES),
                node=attempt.nodes[0], fingerprint=f"{chance.randrange(3_000):x}",
            )
            for attempt in failed
        )  # fmt: skip


def _count() -> float:
    """Return the seconds that counting all of them took."""
    from jobs.failures import counting

    began = time.perf_counter()
    while counting.count(budget_s=60.0):
        pass
    return time.perf_counter() - began


def _make_sums(projects: list[Any]) -> None:
    """Write days and weeks as counting would; sums of several days stand for seven."""
    from jobs.models import Failure, NodeHeld, ProjectHeld, ProjectNodeHeld
    from jobs.reliability.node_time import WEEK, monday

    chance, today = random.Random(14), datetime.now(UTC).date()
    day_s = 86_400.0
    days = [(1, today - timedelta(days=back)) for back in range(DAYS)]
    weeks = [(WEEK, day) for day in sorted({monday(day) for _, day in days})]
    for length, day in [*days, *weeks]:
        projects_by_node = [(f"n{n:04}", chance.sample(projects, 5 if length == 1 else 20)) for n in range(LARGE_NODES)]
        span = {"days": length, "day": day}
        NodeHeld.objects.bulk_create(
            NodeHeld(**span, node=node, node_s=length * day_s, gpu_s=8 * day_s) for node, _ in projects_by_node
        )
        ProjectNodeHeld.objects.bulk_create(
            ProjectNodeHeld(**span, node=node, project=project, node_s=day_s / 5, gpu_s=8 * day_s / 5)
            for node, several in projects_by_node
            for project in several
        )
        ProjectHeld.objects.bulk_create(
            ProjectHeld(
                **span, project=project, partition=name, node_s=11 * day_s, gpu_s=88 * day_s, jobs_queued_s=600,
                jobs_held_s=20_000, jobs_kept_s=18_000,
            )
            for project in projects
            for name in PARTITIONS
        )  # fmt: skip
        if length == 1:
            Failure.objects.bulk_create(_failures(chance, projects, day))


def _failures(chance: random.Random, projects: list[Any], day: date) -> Iterator[Any]:
    from jobs.models import Failure

    at = datetime(day.year, day.month, day.day, tzinfo=UTC)
    for n in range(LARGE_FAILURES // DAYS):
        yield Failure(
            at=at, day=day, project=chance.choice(projects), partition=chance.choice(PARTITIONS),
            node=f"n{chance.randrange(LARGE_NODES):04}", cause=chance.choice(CAUSES), program=f"job {n}",
            is_interruption=n % 3 == 0, lost_node_s=1_800, lost_gpu_s=14_400, detect_s=5, recover_s=300,
            is_settled=True,
        )  # fmt: skip


def _analyze() -> None:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")


def _p95(sam: Any, mira: Any) -> tuple[dict[str, float], float]:
    """Return the p95 of each address, and the CPU time of the most expensive page."""
    from django.conf import settings

    found, clients = {}, {}
    for user, visible in ((sam, "everyone"), (mira, "own")):
        settings.VIGIL_QUEUE_VISIBLE = visible
        clients[visible] = _client(user)
        for by in ("cause", "node", "rack", "partition", "project", "week"):
            for days in (7, 30, 90, 365):
                ways = (f"/reliability?by={by}&days={days}", f"/api/v1/reliability?by={by}&days={days}&limit=200")
                for address in ways:
                    found[visible, address] = stage.page_times(clients[visible], address, TIMES)[0]
        forecast = "/api/v1/reliability/forecast?nodes=64&days=14"
        found[visible, forecast] = stage.page_times(clients[visible], forecast, TIMES)[0]
    visible, dearest = max(found, key=lambda key: found[key])
    settings.VIGIL_QUEUE_VISIBLE = visible
    cpu_ms = stage.page_times(clients[visible], dearest, 5)[1]
    return {f"{visible}: {address}": p95 for (visible, address), p95 in found.items()}, cpu_ms


def _client(user: Any) -> Any:
    from django.test import Client

    client = Client(headers={"host": "127.0.0.1"})
    client.force_login(user, backend="allauth.account.auth_backends.AuthenticationBackend")
    return client


if __name__ == "__main__":
    sys.exit(main())
