"""Measure one evaluation of all health rules with very many open findings: SQL queries, processor time, the writer.

    python -m bench.health_tick [sqlite|postgres] [--nodes 1000]

On 1,000 nodes, every GPU and node has something that lasts: thousands of open findings that each evaluation reads
again. A process of its own watches how long the database's writer is held (as `bench.writer_hold` does). Bars: the
longest hold of SQLite's writer, and the longest wait of another writer on PostgreSQL, ≤ 250 ms. The processor's time
has no bar: such a cluster is lost.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

from bench import stage
from bench.writer_hold import watched

NODES = 1_000
TIMES = 5
BAR_MS = 250.0
PER_NODE = 5  # open findings at least, or the evaluation has nothing to do
LONGEST = ("held_ms", "waited_ms")  # judged by the longest of the steady steps, not the median
STEPS = ("first", "steady", "xids", "boots", "quiet")
"""The findings are new; they last; each node reports an Xid; each has booted; nothing is wrong any more."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.health_tick")
    parser.add_argument("databases", nargs="*", default=["sqlite", "postgres"])
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--one", action="store_true")
    options = parser.parse_args()
    if options.one:
        return _measure(options.databases[0], options.nodes)
    print(stage.machine())
    bars: dict[str, bool] = {}
    figures: dict[str, Any] = {}
    for database in options.databases:
        found = stage.in_child("bench.health_tick", database, "--nodes", str(options.nodes), "--one")
        print(f"\n{database}, {options.nodes:,} nodes, {found['open']:,} open findings")
        for name in STEPS:
            step = found[name]
            print(
                f"  {name:7} {step['cpu_s']:6.2f} s of CPU, {step['queries']} queries, "
                f"writer held {step['held_ms']:.0f} ms, another writer waited {step['waited_ms']:.0f} ms"
            )
        longest = max(found[name]["waited_ms"] for name in STEPS)
        bars[database] = stage.bar(f"{database}, another writer waits", longest, BAR_MS, at_least=False, unit=" ms")
        figures[database] = found
    return stage.result("health_tick", bars=bars, nodes=options.nodes, **figures)


def _measure(database: str, nodes: int) -> int:
    with stage.site(database) as place:
        stage.django(place)
        import portal.celery  # noqa: F401  (binds shared tasks to the site's broker)
        from nodes import tasks
        from nodes.models import HealthEntry

        _make(nodes)
        with watched(database, place) as watcher:
            first = _step(tasks.health)
        found: dict[str, Any] = {"first": first | _writer_times(watcher)}
        steps = []
        for _ in range(TIMES):
            _report()
            with watched(database, place) as watcher:
                step = _step(tasks.health)
            steps.append(step | _writer_times(watcher))
        found["steady"] = {
            name: stage.percentile([step[name] for step in steps], 1.0 if name in LONGEST else 0.5) for name in steps[0]
        }
        found["open"] = HealthEntry.objects.open().count()
        if found["open"] < PER_NODE * nodes:
            raise SystemExit(f"only {found['open']} findings are open")
        for name, kind in (("xids", "xid"), ("boots", "boot")):
            _events(kind)
            with watched(database, place) as watcher:
                step = _step(tasks.judge)
            found[name] = step | _writer_times(watcher)
            tasks.health()
        HealthEntry.objects.all().delete()
        _repair()
        tasks.health()
        _report()
        with watched(database, place) as watcher:
            step = _step(tasks.health)
        found["quiet"] = step | _writer_times(watcher)
        print(json.dumps(found))
    return 0


def _step(task: Callable[[], Any]) -> dict[str, float]:
    from django.db import connection

    queries = 0

    def count(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        nonlocal queries
        queries += 1
        return execute(sql, params, many, context)

    with connection.execute_wrapper(count):
        began = time.process_time()
        task()
        return {"cpu_s": time.process_time() - began, "queries": queries}


def _writer_times(watcher: Any) -> dict[str, float]:
    """Return how long another writer was kept from writing at most, and the longest that it waited for a turn (ms)."""
    return {"held_ms": watcher.longest_ms, "waited_ms": watcher.waited_ms}


def _make(nodes: int) -> None:
    from bench import simulated_fleet
    from nodes.models import Agent, Gpu

    simulated_fleet.make(nodes)
    counters = {"ecc_uncorrected": 0, "ecc_corrected": 3, "remapped_pending": 1, "remapped_failed": 0, "pcie_width": 16,
                "pcie_generation": 5, "power_cap_watts": 700, "nvlinks": [1] * 18, "recovery_action": 0}  # fmt: skip
    Gpu.objects.update(counters=counters)
    mounts = [{"mount": f"/data{i}", "source": f"nfs:/data{i}"} for i in range(3)]
    agents = list(Agent.objects.all())
    for agent in agents:
        agent.facts = {"driver": "570.86.15", "kernel": "Linux 6.8", "mounts": mounts}
        # Two of a node's own findings: a full disk and no shared memory left.
        full = {"disk_total_mib:/": 100_000, "disk_used_mib:/": 99_900, "shm_total_mib": 1_000, "shm_used_mib": 1_000}
        agent.newest["host"] |= full
    Agent.objects.bulk_update(agents, ["facts", "newest"], batch_size=200)
    _report()


def _report() -> None:
    """Let all agents report again, as they do every ten seconds."""
    from django.utils import timezone

    from nodes.models import Agent

    Agent.objects.update(heard_at=timezone.now())


def _repair() -> None:
    from nodes.models import Agent, Gpu

    Gpu.objects.update(counters={}, lost_at=None)
    agents = list(Agent.objects.all())
    for agent in agents:
        for name in ("disk_used_mib:/", "shm_used_mib"):
            agent.newest["host"][name] = 1
        for newest in agent.newest["gpus"].values():
            newest["temperature_c"] = 40
    Agent.objects.bulk_update(agents, ["newest"], batch_size=200)
    _report()


def _events(kind: str) -> None:
    """Let every node report an Xid of one GPU, or that it has booted, in the same moment."""
    from django.utils import timezone

    from nodes.models import Gpu, NodeEvent

    now = timezone.now()
    NodeEvent.objects.bulk_create(
        NodeEvent(
            agent_id=gpu.agent_id,
            gpu=gpu if kind == "xid" else None,
            kind=kind,
            code=79,
            text=kind,
            at=now,
            last_at=now,
        )
        for gpu in Gpu.objects.filter(index=0)
    )


if __name__ == "__main__":
    sys.exit(main())
