"""Measure /waste with a long history of GPU-hours: p95 of every window and grouping, on SQLite and PostgreSQL.

    python -m bench.waste [sqlite|postgres] [--rows 1000000] [--dense]

Bar: p95 ≤ 200 ms each, with 1,000,000 rows of jobs and days over three years, as bench/lists.py has its jobs; and what
a window of 7 days costs at most twice what it costs with 50,000 rows, as the history beyond it is not looked at.
`--dense` puts the rows into the last 30 days, 33,000 jobs a day, which no bar is held against. Also what a minute's
adding up costs when every job of today has changed.
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
from typing import Any

from bench import stage

ROWS, FEW = 1_000_000, 50_000
YEARS_DAYS, DENSE_DAYS = 3 * 365, 30
PROJECTS, PEOPLE = 30, 50
TIMES = 20
BAR_MS, BAR_GROWN = 200.0, 2.0
COLUMNS = (
    "day",
    "scheduler_id",
    '"user"',
    "held_s",
    "used_s",
    "idle_s",
    "is_made_up",
    "job",
    "project_id",
    "person_id",
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.waste")
    parser.add_argument("databases", nargs="*", default=["sqlite", "postgres"])
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--one", action="store_true")
    options = parser.parse_args()
    days = DENSE_DAYS if options.dense else YEARS_DAYS
    if options.one:
        return _measure(options.databases[0], options.rows, days)
    print(stage.machine())
    bars: dict[str, bool] = {}
    figures: dict[str, Any] = {}
    dense = ["--dense"] if options.dense else []
    for database in options.databases:
        few, many = (
            stage.in_child("bench.waste", database, "--rows", str(rows), "--one", *dense)
            for rows in (FEW, options.rows)
        )
        print(f"\n{database}, {options.rows:,} rows over {days:,} days; added up in {many['add_ms']:.0f} ms")
        for address, p95 in many["p95_ms"].items():
            print(f"  {address:46} {p95:7.1f} ms, with {FEW:,} rows {few['p95_ms'][address]:7.1f} ms")
        worst = max(many["p95_ms"].values())
        week = "/waste?by=person&days=7"
        grown = many["p95_ms"][week] / few["p95_ms"][week]
        figures[database] = {"worst_p95_ms": worst, "grown": grown, "add_ms": many["add_ms"]}
        if not options.dense:
            bars[f"{database}_p95"] = stage.bar(f"{database}, worst p95", worst, BAR_MS, at_least=False, unit=" ms")
            bars[f"{database}_grown"] = stage.bar(f"{database}, 7 days", grown, BAR_GROWN, at_least=False, unit="×")
    return stage.result("waste", bars=bars, rows=options.rows, days=days, **figures)


def _measure(database: str, rows: int, days: int) -> int:
    with stage.site(database) as place:
        os.environ.update(place.environment)
        import console.asgi  # noqa: F401  (as the web process: everything loaded)

        sam = _make(rows, days)
        print(json.dumps({"p95_ms": _p95(sam), "add_ms": _add()}))
        return 0


def _make(rows: int, days: int) -> Any:
    from django.db import connection

    from portal.models import Project, User

    projects = [Project.objects.create(slug=f"project-{n:02}").pk for n in range(PROJECTS)]
    people = [User.objects.create(username=f"person-{n:02}").pk for n in range(PEOPLE)]
    sam = User.objects.create(username="sam", is_superuser=True)
    names, table = ", ".join((*COLUMNS, "is_added")), "nodes_gpuuse"
    lines = _lines(random.Random(7), projects, people, rows, days)
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            with cursor.copy(f"COPY {table} ({names}) FROM STDIN") as copy:
                for line in lines:
                    copy.write_row(line)
        else:
            cursor.executemany(f"INSERT INTO {table} ({names}) VALUES ({', '.join(['%s'] * 11)})", list(lines))
        cursor.execute(
            'INSERT INTO jobs_gpuhours (day, project_id, person_id, "user", held_s, used_s, idle_s)'
            f" SELECT day, project_id, person_id, '', sum(held_s), sum(used_s), sum(idle_s) FROM {table}"
            " GROUP BY day, project_id, person_id"
        )
        cursor.execute(
            'INSERT INTO jobs_jobhours (scheduler_id, job, project_id, person_id, "user", first_day, last_day,'
            ' held_s, used_s, idle_s) SELECT scheduler_id, job, max(project_id), max(person_id), max("user"),'
            f" min(day), max(day), sum(held_s), sum(used_s), sum(idle_s) FROM {table} GROUP BY scheduler_id, job"
        )
        cursor.execute("ANALYZE")
    return sam


def _lines(
    chance: random.Random, projects: list[int], people: list[int], rows: int, days: int
) -> Iterator[tuple[Any, ...]]:
    """Yield each job on one or two days, of one person, who is in three projects."""
    today, each = datetime.now(UTC).date(), rows // days
    for back in reversed(range(days)):
        day = today - timedelta(days=back)
        for n in range(each):
            number = (days - back) * each + n - (each if n % 3 == 0 else 0)  # every third began the day before
            person = number % len(people)
            gpu_seconds = chance.expovariate(1 / 20_000)
            yield (
                day, str(number), f"person-{person:02}",
                gpu_seconds, gpu_seconds * chance.random(), gpu_seconds * chance.random() * 0.3,
                False, number, projects[(person + number % 3) % len(projects)], people[person], True,
            )  # fmt: skip


def _p95(user: Any) -> dict[str, float]:
    from django.test import Client

    client = Client(headers={"host": "127.0.0.1"})
    client.force_login(user, backend="allauth.account.auth_backends.AuthenticationBackend")
    found = {}
    for by in ("project", "person", "job"):
        for days in (1, 7, 30, 90):
            for address in (f"/waste?by={by}&days={days}", f"/api/v1/waste?by={by}&days={days}&limit=200"):
                found[address] = stage.page_times(client, address, TIMES)[0]
    return found


def _add() -> float:
    """Return the milliseconds to update a day on which every job was counted again."""
    from jobs.waste import aggregation
    from nodes.models import GpuUse

    today: date = datetime.now(UTC).date()
    GpuUse.objects.filter(day=today).update(is_added=False)
    began = time.perf_counter()
    aggregation.update_sums()  # once: it finds no attempts, so a second time the rows would be nobody's already
    return (time.perf_counter() - began) * 1000


if __name__ == "__main__":
    sys.exit(main())
