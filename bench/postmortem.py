"""Measure post-mortems with a long history of incidents: p95 of page, REST and list, on SQLite and PostgreSQL.

    python -m bench.postmortem [sqlite|postgres] [--incidents 100000] [--ranks 64]

Bar: the page of an attempt of 64 ranks, with 40 lines of evidence, 200,000 steps of series and the attempt that
continued, p95 ≤ 150 ms; the list with any of its filters p95 ≤ 150 ms, for a sysadmin, a member of the project that
has half of all, and one of a project with few. In process, so what is timed is the server's own work; its CPU time
(the median, without PostgreSQL's) says more where others load the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from datetime import timedelta
from typing import Any

from bench import stage

INCIDENTS, RANKS = 100_000, 64
PROJECTS, JOBS, NODES = 30, 1_000, 512
STEPS = 200_000
TIMES = 20
BAR_MS = 150.0
CAUSES = ("memory.gpu_oom", "program.exception", "collective.timeout", "gpu.ecc", "network.fabric", "unknown")
RARE = "gpu.off_bus"  # one in a thousand


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.postmortem")
    parser.add_argument("databases", nargs="*", default=["sqlite", "postgres"])
    parser.add_argument("--incidents", type=int, default=INCIDENTS)
    parser.add_argument("--ranks", type=int, default=RANKS)
    parser.add_argument("--one", action="store_true")
    options = parser.parse_args()
    sizes = ("--incidents", str(options.incidents), "--ranks", str(options.ranks))
    if options.one:
        return _measure(options.databases[0], options.incidents, options.ranks)
    print(stage.machine())
    bars: dict[str, bool] = {}
    figures: dict[str, Any] = {}
    for database in options.databases:
        found = stage.in_child("bench.postmortem", database, *sizes, "--one")
        print(
            f"\n{database}, {options.incidents:,} incidents, {options.ranks:,} ranks; made in {found['made_s']:.0f} s"
        )
        for who, addresses in found["p95_ms"].items():
            for address, p95 in addresses.items():
                print(f"  {who:9}{address:64} {p95:7.1f} ms, CPU {found['cpu_ms'][who][address]:6.1f} ms")
        pages = [p95 for of in found["p95_ms"].values() for address, p95 in of.items() if "/jobs/" in address]
        lists = [p95 for of in found["p95_ms"].values() for address, p95 in of.items() if "/jobs/" not in address]
        figures[database] = {"page_p95_ms": max(pages), "list_p95_ms": max(lists)}
        for what, p95 in (("page", max(pages)), ("list", max(lists))):
            named = f"{database}, worst p95 of a {what}"
            bars[f"{database}_{what}"] = stage.bar(named, p95, BAR_MS, at_least=False, unit=" ms")
    return stage.result("postmortem", bars=bars, incidents=options.incidents, ranks=options.ranks, **figures)


def _measure(database: str, incidents: int, ranks: int) -> int:
    with stage.site(database) as place:
        os.environ.update(place.environment)
        import console.asgi  # noqa: F401  (as the web process: everything loaded)

        began = time.perf_counter()
        people, job_id = _make(incidents, ranks)
        made = time.perf_counter() - began
        wall, cpu = _times(people, job_id)
        print(json.dumps({"p95_ms": wall, "cpu_ms": cpu, "made_s": made}))
        return 0


def _make(incidents: int, ranks: int) -> tuple[dict[str, Any], int]:
    """Create a history, of which one project has half and the last one few, and the job whose page is requested."""
    from django.db import connection
    from django.utils import timezone

    from jobs.models import Attempt, Incident, Job
    from portal.models import Membership, Project, User

    chance, now = random.Random(7), timezone.now()
    projects = [Project.objects.create(slug=f"project-{n:02}") for n in range(PROJECTS)]
    people = {"sysadmin": User.objects.create(username="sam", is_superuser=True)}
    for name, project in (("half", projects[0]), ("few", projects[-1])):
        people[name] = User.objects.create(username=name)
        Membership.objects.create(user=people[name], project=project)
    owners = [projects[0] if n % 2 else projects[1 + n // 2 % (PROJECTS - 2)] for n in range(JOBS - 3)]
    jobs = [
        Job.objects.create(
            project=project, owner=people["half"], name=f"job-{n}", kind="distributed", spec={}, spec_toml=""
        )
        for n, project in enumerate([*owners, *[projects[-1]] * 3])
    ]
    for start in range(0, incidents, 10_000):
        numbers = range(start, min(incidents, start + 10_000))
        attempts = Attempt.objects.bulk_create(
            Attempt(job=jobs[n % JOBS], number=n // JOBS + 1, state="failed", ended_at=now) for n in numbers
        )
        Incident.objects.bulk_create(
            Incident(
                attempt=attempt, project_id=jobs[n % JOBS].project_id, at=now - timedelta(minutes=5 * (incidents - n)),
                version=1, is_final=True, cause=RARE if n % 1_000 == 0 else chance.choice(CAUSES), confidence=0.9,
                says="Unhandled exception on rank 3: KeyError: 'label'.",
                node=f"dgx-{chance.randrange(NODES):03}", rank=3,
                fingerprint=f"{chance.randrange(2_000):016x}", published_at=now if n % 300 == 0 else None,
            )
            for n, attempt in zip(numbers, attempts, strict=True)
        )  # fmt: skip
    job_id = _job(jobs[1], ranks)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    return people, job_id


def _job(like: Any, ranks: int) -> int:
    """Create a job with an attempt of this many ranks that ended, and the attempt that continues."""
    from django.utils import timezone

    from jobs.models import Attempt, Checkpoint, Diagnosis, Incident, Job, Stream

    now = timezone.now()
    nodes = [f"dgx-{n:03}" for n in range(ranks // 8)]
    resources = {"nodes": len(nodes), "gpus_per_node": 8}
    job = Job.objects.create(
        project=like.project,
        owner=like.owner,
        name="large",
        kind="distributed",
        spec={"resources": resources},
        spec_toml="",
    )
    ended = now - timedelta(minutes=30)
    began = {"started_at": ended - timedelta(days=2), "ended_at": ended, "decided_at": ended}
    first = Attempt.objects.create(job=job, number=1, state="failed", nodes=nodes, step=STEPS, **began)
    checkpoint = Checkpoint.objects.create(
        job=job, attempt=first, step=STEPS - 400, generation=1, name="step", state="verified",
        created_at=ended - timedelta(minutes=8),
    )  # fmt: skip
    second = Attempt.objects.create(
        job=job, number=2, state="running", nodes=nodes, step=STEPS + 500, resume_from=checkpoint,
        started_at=ended + timedelta(minutes=2),
    )  # fmt: skip
    Job.objects.filter(pk=job.pk).update(latest=second)
    Stream.objects.bulk_create(
        Stream(attempt=first, uid=f"{rank:08x}", incarnation=0, rank=rank, node=nodes[rank // 8])
        for rank in range(ranks)
    )
    _series(first.pk, ranks, 1, STEPS, ended.timestamp() - 2 * 86_400)
    _series(second.pk, 1, checkpoint.step + 1, STEPS + 500, ended.timestamp() + 180)
    incident = Incident.objects.create(
        attempt=first, project=job.project, at=ended, version=2, is_final=True, cause="gpu.off_bus", confidence=0.97,
        says="GPU fell off the bus on rank 21 (dgx-002, Xid 79).", rank=21, node=nodes[-1], fingerprint=f"{7:016x}",
    )  # fmt: skip
    for version in (1, 2):
        Diagnosis.objects.create(
            incident=incident,
            version=version,
            cause="gpu.off_bus",
            confidence=0.97,
            verdict=_verdict(nodes, ended.timestamp()),
        )
    return int(job.pk)


def _series(attempt_id: int, ranks: int, first: int, last: int, began: float) -> None:
    import numpy as np

    from jobs.intake.reports import owner_of
    from portal.series import store
    from portal.series.codec import POINTS, Points

    names = ("loss", "step_seconds")
    ids = store.declare(owner_of(attempt_id), names)
    rows = []
    for start in range(first, last + 1, POINTS):
        step = np.arange(start, min(last + 1, start + POINTS), dtype=np.int64)
        taken, values = began + 0.86 * (step - first), 2.0 + 0.01 * np.sin(step)
        points = Points(step, taken.astype(np.float64), values.astype(np.float64))
        for name in names:
            rows += [store.merged_row(ids[name], 0, rank, points) for rank in range(ranks if name != "loss" else 1)]
    store.insert(rows)


def _verdict(nodes: list[str], ended: float) -> dict[str, Any]:
    evidence = [
        {
            "file": f"0.{n}.log", "line": 1_000 + n, "text": f"NCCL WARN call {n} failed: {'x' * 200} {n}", "rank": n,
            "role": "root" if not n else "echo", "cause": "gpu.off_bus", "at": ended - 40 + n,
            "node": nodes[n // 8 % len(nodes)],
        }
        for n in range(40)
    ]  # fmt: skip
    return {
        "cause": "gpu.off_bus", "title": "GPU fell off the bus", "confidence": 0.97, "owner": "sysadmin",
        "says": "GPU fell off the bus on rank 21 (dgx-002, Xid 79).", "advice": "Drain the node.", "evidence": evidence,
        "runner_up": None, "ruled_out": [], "not_seen": [], "rank": 21, "node": nodes[-1], "exception": "", "frame": "",
        "doing": "", "entry": "",
    }  # fmt: skip


Figures = dict[str, dict[str, float]]


def _times(people: dict[str, Any], job_id: int) -> tuple[Figures, Figures]:
    """Return the p95 of time and the median of CPU time of each person's addresses."""
    from django.test import Client

    documents = [f"/jobs/{job_id}/postmortem", f"/api/v1/jobs/{job_id}/postmortem", f"/jobs/{job_id}/postmortem.md"]
    queries = ["", "since=30d", f"cause={RARE}", "owner=sysadmin", "node=dgx-007", "published=yes", "published=no"]
    queries += ["project=project-01", f"project=project-00&cause={RARE}", "published=yes&owner=researcher"]
    lists = [f"/postmortems?{query}" for query in queries]
    lists += [f"/api/v1/postmortems?limit=200&cause={RARE}", "/api/v1/postmortems?limit=200"]
    wall: Figures = {}
    cpu: Figures = {}
    for who, user in people.items():
        client = Client(headers={"host": "127.0.0.1"})
        client.force_login(user, backend="allauth.account.auth_backends.AuthenticationBackend")
        addresses = lists if who == "few" else [*documents, *lists]
        both = {address: stage.page_times(client, address, TIMES) for address in addresses}
        wall[who] = {address: taken[0] for address, taken in both.items()}
        cpu[who] = {address: taken[1] for address, taken in both.items()}
    return wall, cpu


if __name__ == "__main__":
    sys.exit(main())
