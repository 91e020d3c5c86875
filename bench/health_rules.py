"""Measure health rules: live evaluation of a large cluster, and a dry run of rules over thirty days.

    python -m bench.health_rules [sqlite|postgres] [--nodes 100] [--only live|past]

Bars: all rules over 1,000 nodes × 8 GPUs, evaluated every five seconds on what agents sample at 1 Hz, ≤ 10 % of a core;
a dry run over 30 days of 100 nodes × 8 GPUs ≤ 10 s: a rule on high temperatures, and one on Xids. Rules whose threshold
lies within the everyday values of every GPU change all the time; they stop at the time limit of a dry run, and no bar
is held against them. `--nodes` tries the past of a larger cluster without a time limit or a bar.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np

from bench import stage

LIVE_NODES, NODES, GPUS, DAYS = 1_000, 100, 8, 30
EVERY_S, TIMES = 5.0, 5
XIDS = 2_000  # per hundred nodes
BAR_SHARE, BAR_S = 0.10, 10.0
WINDOW = 1_024
HOT_C, HOT_MINUTES = 86, 20  # once in the month, on every sixteenth GPU
RULE = """
[[rule]]
name = "{name}"
title = "t"
source = "a bench"
severity = "warning"
action = "drain"
signal = "gpu_samples"
where = {{ {where} }}
for = "5m"
clears = "recovered"
clears_after = "10m"
"""
XID = """
[[rule]]
name = "xid"
title = "t"
source = "a bench"
severity = "warning"
action = "drain"
signal = "xid"
where = { code = [31, 63, 79] }
count = 3
within = "7d"
distinct = { user = 2 }
clears = "quiet"
clears_after = "24h"
"""
PAST_RULES = {
    "hot": RULE.format(name="hot", where='margin_c = "<= 3"'),
    "everyday": RULE.format(name="everyday", where='temperature_c = ">= 66"'),
    "two fields": RULE.format(name="two", where='temperature_c = ">= 66", throttle = "has 0x04"'),
    "xid": XID,
}
WITH_BAR = ("hot", "xid")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.health_rules")
    parser.add_argument("databases", nargs="*", default=["sqlite", "postgres"])
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--only", choices=("live", "past"))
    parser.add_argument("--one", action="store_true")
    options = parser.parse_args()
    if options.one:
        return _measure(options.databases[0], options.nodes, is_live=options.only == "live")
    print(stage.machine())
    bars: dict[str, bool] = {}
    figures: dict[str, Any] = {}
    for database in options.databases:
        found: dict[str, Any] = {}
        for part in (options.only,) if options.only else ("live", "past"):  # each with a site of its own
            arguments = (database, "--nodes", str(options.nodes), "--only", part, "--one")
            found |= stage.in_child("bench.health_rules", *arguments)
        print(f"\n{database}")
        if "live" in found:
            live = found["live"]
            share = live["cpu_s"] / EVERY_S
            print(f"  {live['rules']} rules, {LIVE_NODES:,} nodes: {live['cpu_s']:.2f} s of CPU every {EVERY_S:.0f} s")
            bars[f"{database}_live"] = stage.bar(
                f"{database}, live", 100 * share, 100 * BAR_SHARE, at_least=False, unit=" % of a core"
            )
        for name, past in found.get("past", {}).items():
            print(f"  {name}: {past['seconds']:.1f} s, {past['found']:,} findings {past['cut']}")
        if "past" in found and options.nodes <= NODES:
            worst = max(found["past"][name]["seconds"] for name in WITH_BAR)
            bars[f"{database}_past"] = stage.bar(f"{database}, dry run", worst, BAR_S, at_least=False, unit=" s")
        figures[database] = found
    return stage.result("health_rules", bars=bars, nodes=options.nodes, **figures)


def _measure(database: str, nodes: int, *, is_live: bool) -> int:
    with stage.site(database) as place:
        os.environ.update(place.environment)
        import console.asgi  # noqa: F401  (everything loaded, as in the worker)

        print(json.dumps({"live": _live()} if is_live else {"past": _past(nodes)}))
    return 0


def _live() -> dict[str, float]:
    """Return the CPU seconds of an evaluation, the median of several; nothing is found in most."""
    from django.utils import timezone

    from bench import simulated_fleet
    from bench.empty_site import spent
    from nodes.models import Agent, Gpu, HealthEntry
    from nodes.monitoring.evaluate import evaluate
    from nodes.monitoring.site_rules import rules_in_force

    simulated_fleet.make(LIVE_NODES)
    counters = {"ecc_uncorrected": 0, "ecc_corrected": 3, "remapped_pending": 0, "remapped_failed": 0, "pcie_width": 16,
                "pcie_generation": 5, "power_cap_watts": 700, "nvlinks": [1] * 18, "recovery_action": 0}  # fmt: skip
    Gpu.objects.update(counters=counters, facts={"vbios": "96.00.89.00.01"})
    mounts = [{"mount": f"/data{i}", "source": f"nfs:/data{i}"} for i in range(3)]
    facts = {"driver": "570.86.15", "kernel": "Linux 6.8", "mounts": mounts}
    taken = []
    for _ in range(TIMES + 1):
        Agent.objects.update(heard_at=timezone.now(), facts=facts)
        began = spent()
        evaluate()
        taken.append(spent() - began)
    if not HealthEntry.objects.exists():
        raise SystemExit("the evaluation read nothing: lost and hot GPUs have no entries")
    return {"cpu_s": stage.percentile(taken[1:], 0.5), "rules": len(rules_in_force())}


def _past(nodes: int) -> dict[str, Any]:
    from nodes.health.rules.rule import parse_rules
    from nodes.monitoring.dry_run import run as module

    began = time.perf_counter()
    now = _make_past(nodes)
    print(f"  30 days of {nodes:,} nodes stored in {time.perf_counter() - began:.0f} s", flush=True)
    module.MAX_FOUND = 10**9 if nodes > NODES else module.MAX_FOUND
    found: dict[str, Any] = {}
    for name, text in PAST_RULES.items():
        (rule,) = parse_rules(text)
        began, began_cpu = time.perf_counter(), time.process_time()
        result = module.dry_run(rule, now=now, budget_s=None if name in WITH_BAR else module.BUDGET_S)
        found[name] = {
            "seconds": time.perf_counter() - began, "cpu_s": time.process_time() - began_cpu, "found": result.found,
            "cut": result.cut, "nodes": result.nodes_read,
        }  # fmt: skip
        has_findings = result.found > 0 or nodes < NODES  # a few nodes may have had no three Xids in a week
        if name in WITH_BAR and not (has_findings and result.nodes_read == nodes):
            raise SystemExit(f"{name}: {result.found} findings, {result.nodes_read} of {nodes} nodes were read")
    return found


def _make_past(nodes: int) -> datetime:
    """Store temperatures and throttle bits of all GPUs: 28 days of minutes, two of seconds; and Xids."""
    from django.db import connection

    from nodes.models import Agent, Gpu, Holding, Node, NodeEvent, Partition

    now = datetime.now(UTC)
    end = int(now.timestamp()) // WINDOW * WINDOW
    Partition.objects.create(name="gpu")
    names = [f"dgx-{number:04}" for number in range(nodes)]
    Node.objects.bulk_create(Node(name=name, state="idle", partitions=["gpu"], gpus=GPUS) for name in names)
    agents = Agent.objects.bulk_create(Agent(node=name, sampled_at=end, merged_to=end, heard_at=now) for name in names)
    gpus = Gpu.objects.bulk_create(
        Gpu(uuid=f"GPU-{agent.pk}-{index}", agent=agent, index=index, slowdown_c=87, model="H100")
        for agent in agents
        for index in range(GPUS)
    )
    _store_series([gpu.pk for gpu in gpus], end)
    chance = np.random.default_rng(5)
    events, holdings = [], []
    for number in range(XIDS * nodes // NODES):
        gpu = gpus[int(chance.integers(len(gpus)))]
        at = now - timedelta(seconds=float(chance.uniform(0, DAYS * 86_400)))
        code = int(chance.choice([13, 31, 43, 45, 63, 79], p=[0.3, 0.3, 0.2, 0.1, 0.05, 0.05]))
        events.append(
            NodeEvent(
                agent_id=gpu.agent_id,
                gpu=gpu,
                kind="xid",
                code=code,
                text=f"code {number}",
                at=at,
                last_at=at,
                judged=1,
            )
        )
        holdings.append(
            Holding(
                gpu=gpu, agent_id=gpu.agent_id, scheduler_id=str(number), user=f"user{number % 50}", name="train",
                source="scheduler", since=at - timedelta(hours=5), until=at + timedelta(minutes=1),
            )
        )  # fmt: skip
    NodeEvent.objects.bulk_create(events, batch_size=500)
    Holding.objects.bulk_create(holdings, batch_size=500)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    return now


def _store_series(gpu_ids: list[int], end: int) -> None:
    """Store chunks of sixteen different GPUs, and copies of them for the others: only their owners differ."""
    from django.db import connection, transaction

    from nodes.telemetry.thin import MINUTES, thinned
    from portal.models import Chunk, Series
    from portal.series import store
    from portal.series.codec import Points

    chance = np.random.default_rng(7)
    days_of_seconds = 2 * 86_400 // WINDOW
    first_minute = (end - DAYS * 86_400) // (60 * WINDOW) * 60 * WINDOW
    last_minute = (end - days_of_seconds * WINDOW) // (60 * WINDOW) * 60 * WINDOW
    shown = gpu_ids[:16]
    for gpu_id in shown:
        rows: list[Any] = []
        for field in ("temperature_c", "throttle"):
            ids = {column: store.declare(("gpu", gpu_id), [thinned(field, 60)], column=column)[thinned(field, 60)]
                   for column in ("", Series.Column.MIN, Series.Column.MAX)}  # fmt: skip
            exact = store.declare(("gpu", gpu_id), [field])[field]
            for start in range(first_minute, last_minute, 60 * WINDOW):
                step = start + MINUTES.seconds * np.arange(WINDOW, dtype=np.int64)
                mean = _values(chance, field, WINDOW)
                if gpu_id == shown[0] and start == first_minute + 60 * WINDOW and field == "temperature_c":
                    mean[:HOT_MINUTES] = HOT_C
                spread = 2 if field == "temperature_c" else 0
                for column, values in (
                    ("", mean),
                    (Series.Column.MIN, mean - spread),
                    (Series.Column.MAX, mean + spread),
                ):
                    rows.append(
                        store.merged_row(ids[column], 0, 0, Points(step, np.full(WINDOW, float(start)), values))
                    )
            for start in range(last_minute, end, WINDOW):
                step = start + np.arange(WINDOW, dtype=np.int64)
                points = Points(step, np.full(WINDOW, float(start)), _values(chance, field, WINDOW))
                rows.append(store.merged_row(exact, 0, 0, points))
        with transaction.atomic():
            store.insert(rows)
    series = list(Series.objects.filter(owner_id__in=shown).values_list("owner_id", "name", "column", "pk"))
    columns = [
        field.column for field in Chunk._meta.concrete_fields if not field.primary_key and field.column != "series_id"
    ]
    quoted = ", ".join(f'"{column}"' for column in columns)
    for place in range(16, len(gpu_ids), 16):
        copies = dict(zip(shown, gpu_ids[place : place + 16], strict=False))
        with transaction.atomic(), connection.cursor() as cursor:
            for owner, name, column, old in series:
                if owner in copies:
                    new = Series.objects.create(owner_kind="gpu", owner_id=copies[owner], name=name, column=column).pk
                    cursor.execute(
                        f"INSERT INTO portal_chunk (series_id, {quoted}) SELECT %s, {quoted} FROM portal_chunk"
                        " WHERE series_id = %s",
                        [new, old],
                    )


def _values(chance: np.random.Generator, field: str, number: int) -> Any:
    if field == "throttle":
        return np.where(chance.random(number) < 0.02, 4.0, 0.0)
    slow = np.repeat(chance.normal(0, 4, number // 64), 64)  # jobs come and go
    return np.clip(66 + slow + chance.normal(0, 1, number), 35, 82).round()


if __name__ == "__main__":
    sys.exit(main())
