"""/metrics of a large cluster: p95 of one scrape, on SQLite and PostgreSQL.

    python -m bench.metrics [sqlite|postgres] [--nodes 1000] [--events 100000]

Bar: 1,000 nodes × 8 GPUs, each with values and three of four held, 5,000 jobs in the queue and 100,000 rows of Xids, in
≤ 300 ms. In process, so what is timed is the server's own work: queries and text.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

from bench import stage

NODES, GPUS, EVENTS, JOBS = 1_000, 8, 100_000, 5_000
TIMES = 20
BAR_MS = 300.0
TOKEN = "the token of a bench"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.metrics")
    parser.add_argument("databases", nargs="*", default=["sqlite", "postgres"])
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--events", type=int, default=EVENTS)
    parser.add_argument("--one", action="store_true")
    options = parser.parse_args()
    if options.one:
        return _measure(options.databases[0], options.nodes, options.events)
    print(stage.machine())
    bars: dict[str, bool] = {}
    figures: dict[str, Any] = {}
    for database in options.databases:
        many = ("--nodes", str(options.nodes), "--events", str(options.events))
        found = stage.in_child("bench.metrics", database, *many, "--one")
        print(f"{database}: {found['lines']:,} lines, {found['mb']:.1f} MB, median {found['median_ms']:.0f} ms")
        what = f"{database}, a scrape's p95"
        bars[database] = stage.bar(what, found["p95_ms"], BAR_MS, at_least=False, unit=" ms")
        figures[database] = found
    return stage.result("metrics", bars=bars, nodes=options.nodes, **figures)


def _measure(database: str, nodes: int, events: int) -> int:
    with stage.site(database) as place:
        os.environ.update(place.environment | {"VIGIL_METRICS_TOKEN": TOKEN})
        import console.asgi  # noqa: F401  (as the web process: everything loaded)

        _make(nodes, events)
        print(json.dumps(_scraped()))
        return 0


def _make(nodes: int, events: int) -> None:
    from django.db import connection
    from django.utils import timezone

    from nodes.models import Agent, Gpu, Holding, Node, NodeEvent, QueuedJob

    # Later than now, so that nobody falls silent while it is measured.
    now = timezone.now() + timedelta(hours=1)
    values = {
        "gpu_percent": 87,
        "memory_mib": 70_000,
        "temperature_c": 61,
        "watts": 640,
        "throttle": 0,
        "quiet_since": 1,
    }
    names = [f"dgx-{number:04}" for number in range(nodes)]
    uuids = {name: [f"GPU-{name}-{i:04x}-0000-0000-000000000000" for i in range(GPUS)] for name in names}
    agents = Agent.objects.bulk_create(
        Agent(node=name, heard_at=now, newest={"gpus": dict.fromkeys(uuids[name], values)}) for name in names
    )
    gpus = Gpu.objects.bulk_create(
        Gpu(uuid=uuid, agent=agent, index=i) for agent in agents for i, uuid in enumerate(uuids[agent.node])
    )
    Holding.objects.bulk_create(
        Holding(gpu=gpu, agent_id=gpu.agent_id, scheduler_id=str(i // 8), source="scheduler", since=now)
        for i, gpu in enumerate(gpus)
        if i % 4
    )
    Node.objects.bulk_create(Node(name=name, state="mixed") for name in names)
    QueuedJob.objects.bulk_create(
        QueuedJob(scheduler_id=str(i), name="a", state="running" if i % 3 else "pending", partition=f"p{i % 6}")
        for i in range(JOBS)
    )
    NodeEvent.objects.bulk_create(
        (
            NodeEvent(
                agent_id=gpu.agent_id, gpu=gpu, kind="xid", code=(13, 31, 43, 79)[i % 4], at=now, last_at=now, count=3
            )
            for i in range(events)
            for gpu in (gpus[i * 7 % len(gpus)],)
        ),
        batch_size=5_000,
    )  # fmt: skip
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")


def _scraped() -> dict[str, float]:
    from django.test import Client

    client = Client(headers={"host": "127.0.0.1", "Authorization": f"Bearer {TOKEN}"})
    taken, text = [], ""
    for _ in range(TIMES + 2):
        began = time.perf_counter()
        text = client.get("/metrics").text
        taken.append((time.perf_counter() - began) * 1000)
    assert "vigil_gpu_utilization_ratio" in text
    figures = {"p95_ms": stage.percentile(taken[2:], 0.95), "median_ms": stage.percentile(taken[2:], 0.5)}
    return {**figures, "lines": text.count("\n"), "mb": len(text) / 1e6}


if __name__ == "__main__":
    sys.exit(main())
