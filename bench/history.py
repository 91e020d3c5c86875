"""A lab's long history, written in bulk: what lists, ticks and intake are measured beside.

Projects are skewed: half of all jobs are in one, and one has 300. Names repeat; three in ten jobs had an earlier
attempt; twenty are alive. The rows are made by the database from a narrow table of what differs, before there are
indexes (bench/bulk.py), and the listing is brought in step afterwards, as by an upgrade of a database that had none.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from django.db import connection, transaction
from django.utils import timezone

from bench import bulk, traces
from jobs.disk import sums
from jobs.listing import triggers
from jobs.models import Attempt, Job
from jobs.models.job import Tag
from jobs.models.listing import Listing
from jobs.spec import JobSpec
from portal.models import Membership, Project, User

PROJECTS = 30
PEOPLE = 50
ALIVE = 20
TINY = 300  # jobs of the smallest project
STATES = ["completed"] * 120 + ["failed"] * 30 + ["cancelled"] * 20 + ["timeout"] * 10 + ["out_of_memory"] * 8
STATES += ["node_fail"] * 5 + ["preempted"] * 5 + ["deadline"]
FIRST = ("gpt", "lora", "vit", "asr", "nightjar", "siskin", "moe", "clip", "unet", "digits")
SECOND = ("base", "large", "tiny", "sweep", "ablate", "warmup", "retry", "eval")
KINDS = ["distributed"] * 30 + ["script"] * 9 + ["attached"]
TAGS = ("night", "baseline", "paper", *[None] * 7)
BLOCK = 20_000


@dataclass(frozen=True)
class Lab:
    """The people who look: the sysadmin sees all, the others one project each."""

    sysadmin: User
    large: User
    tiny: User


def make(jobs: int) -> tuple[Lab, dict[str, float]]:
    """People, projects and so many jobs; and the seconds that it took, by part."""
    chance = random.Random(7)
    projects = [Project.objects.create(slug=f"project-{n:02}") for n in range(PROJECTS)]
    people = [User.objects.create(username=f"person-{n:02}") for n in range(PEOPLE)]
    Membership.objects.bulk_create([Membership(user=person, project=projects[0]) for person in people[:20]])
    Membership.objects.create(user=people[20], project=projects[-1])
    Membership.objects.filter(user__in=[people[0], people[20]]).update(role=Membership.Role.LEAD)
    lab = Lab(User.objects.create(username="sam", is_superuser=True), people[0], people[20])
    took: dict[str, float] = {}
    began = time.perf_counter()

    def done(part: str) -> None:
        nonlocal began
        took[part], began = time.perf_counter() - began, time.perf_counter()

    with bulk.writing(connection, (Job, Attempt, Tag, Listing, *traces.KINDS)) as cursor:
        triggers.drop_triggers(connection)
        _differences(cursor, _lines(chance, [row.pk for row in projects], [row.pk for row in people], jobs))
        done("what differs")
        _rows(cursor, jobs)
        triggers.rebuild(connection)
        done("rows")
        traces.write(cursor, jobs, BLOCK)
        cursor.execute("DROP TABLE history")
        done("traces")
    done("indexes")
    triggers.create_triggers(connection)
    done("listing")
    bulk.settle(connection)
    sums.update()  # as the worker would within a minute
    done("settled")
    return lab, took


def _differences(cursor: Any, rows: Iterator[tuple[Any, ...]]) -> None:
    cursor.execute(
        "CREATE TEMPORARY TABLE history (i bigint PRIMARY KEY, project bigint, owner bigint, kind text, name text,"
        " created bigint, state text, started bigint, ended bigint, earlier integer, tag text)"
    )
    if connection.vendor == "postgresql":
        with cursor.copy("COPY history FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)
        cursor.execute("ANALYZE history")
    else:
        with transaction.atomic():
            cursor.executemany(f"INSERT INTO history VALUES ({', '.join(['%s'] * 11)})", rows)


def _lines(chance: random.Random, projects: list[int], people: list[int], jobs: int) -> Iterator[tuple[Any, ...]]:
    """Yield what differs between jobs; times are seconds since 1970."""
    now, every = int(timezone.now().timestamp()), 3 * 365 * 86400 / jobs
    other = [1 / (n + 1) for n in range(len(projects) - 2)]
    of_project = list(accumulate([sum(other), *other]))
    of_person = list(accumulate(math.exp(-n / 10) for n in range(len(people))))
    every_tiny = max(1, jobs // TINY)
    for before in range(0, jobs, BLOCK):
        many = min(BLOCK, jobs - before)
        lines = zip(
            chance.choices(projects[:-1], cum_weights=of_project, k=many),
            chance.choices(people, cum_weights=of_person, k=many),
            chance.choices(KINDS, k=many),
            zip(*(chance.choices(part, k=many) for part in (FIRST, SECOND, range(1, 2001))), strict=True),
            chance.choices(STATES, k=many),
            chance.choices(range(60, 300 * 60), k=many),
            chance.choices(range(60, 900 * 60), k=many),
            chance.choices((1, 1, 1, 0, 0, 0, 0, 0, 0, 0), k=many),
            chance.choices(TAGS, k=many),
            strict=True,
        )
        for i, (project, owner, kind, name, state, waited, ran, earlier, tag) in enumerate(lines, before + 1):
            created = now - 600 - int(every * (jobs - i + 1))
            started: int | None = min(created + waited, now - 240)
            ended: int | None = min(created + waited + ran, now - 120)
            if i > jobs - ALIVE:
                state, earlier, ended = ("running" if i % 2 else "pending"), 0, None
                started = started if i % 2 else None
            project = projects[-1] if i % every_tiny == 0 else project
            yield i, project, owner, kind, "{}-{}-{}".format(*name), created, state, started, ended, earlier, tag


def _rows(cursor: Any, jobs: int) -> None:
    created, started, ended = (bulk.time_of(name, connection.vendor) for name in ("created", "started", "ended"))
    spec = JobSpec.parse({"name": "x"}).model_dump(mode="json")
    job = Job(project_id=0, owner_id=0, kind="", name="", spec=spec, spec_toml="# " + "x" * 200)
    of_job = {"id": "i", "project_id": "project", "owner_id": "owner", "kind": "kind", "name": "name"}
    measured = bulk.time_of("COALESCE(ended, created) + 60", connection.vendor)
    of_job |= {"latest_id": "i * 2", "created_at": created, "disk_measured_at": measured}
    values = (
        """CAST('{"train.seed": 1}' AS jsonb)""" if connection.vendor == "postgresql" else """'{"train.seed": 1}'"""
    )
    of_sweep = {"sweep_id": f"i / {traces.EVERY}", "sweep_index": f"i %% {traces.EVERY}", "sweep_values": values}
    of_job |= {name: f"CASE WHEN {traces.SWEPT} THEN {value} END" for name, value in of_sweep.items()}
    of_job |= {"disk_bytes": "i %% 1000 * 4096"}
    latest = {"loss": 2.3, "validation_loss": 2.4, "step_seconds": 0.2, "tokens_per_second": 41_000.0}
    attempt = Attempt(number=1, latest=latest, nodes=["dgx-01"], step=150, steps=200, state="failed", decision="over")
    over = ("ended_at", "closed_at", "decided_at", "collected_at", "spools_removed_at", "slurm_steps_at")
    either = {"job_id": "i", "created_at": created, "submitted_at": created, "started_at": started}
    first = either | dict.fromkeys(over, started)
    first |= {"id": "i * 2 - 1", "key": "'e' || i", "number": "1", "scheduler_id": "'e' || i", "state": "'node_fail'"}
    last = either | dict.fromkeys(over, ended)
    last |= {"id": "i * 2", "key": "'k' || i", "number": "1 + earlier", "scheduler_id": "'' || i", "state": "state"}
    for before in range(0, jobs, BLOCK):  # by and by, so that rows come in the order of their numbers
        block = f"history WHERE i > {before} AND i <= {before + BLOCK}"
        with transaction.atomic():
            bulk.insert(cursor, job, of_job, block)
            bulk.insert(cursor, attempt, first, f"{block} AND earlier = 1")
            bulk.insert(cursor, attempt, last, block)
    cursor.execute("INSERT INTO jobs_tag (job_id, name) SELECT i, tag FROM history WHERE tag IS NOT NULL ORDER BY i")
    bulk.count_on(connection, (Job, Attempt, Tag), 2 * jobs + 1)
