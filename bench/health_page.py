"""Time the pages and lists of nodes' health with long histories: p95 on the server, SQLite and PostgreSQL.

    python -m bench.health_page [sqlite|postgres] [--entries 10000] [--nodes 1000]

Bar: with 10,000 active findings, thirty times as many that are cleared, 300,000 past orders and 30,000 burn-ins,
p95 ≤ 150 ms each for a sysadmin, on 1,000 nodes of which 200 are out of service. Next to it what a tenth of the nodes
with ten findings and hardly any history cost, and the number of SQL queries. In process, so what is timed is the
server's own work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from typing import Any
from urllib.parse import urlencode

from bench import stage

ENTRIES, FEW, PER_ENTRY, BURN_INS_PER_ENTRY = 10_000, 10, 30, 3
NODES, FEW_NODES = 1_000, 100
TIMES, TIMES_OF_A_FILTER = 20, 6
BAR_MS = 150.0
ADDRESSES = (
    "/health", "/health/entries", "/health/entries?state=open", "/health/entries?node=dgx-050",
    "/health/entries?severity=fatal", "/drains", "/burnins", "/burnins?node=dgx-050", "/inventory", "/nodes/dgx-050",
    "/nodes", "/api/v1/drains?limit=200", "/api/v1/burnins", "/api/v1/burnins?node=dgx-050", "/api/v1/inventory",
    "/api/v1/inventory/nodes?software=driver&version=550.54.15",
)  # fmt: skip
FILTERS = {
    "state": ("", "watching", "open", "dismissed", "cleared"),
    "severity": ("", "info", "fatal"),
    "rule": ("", "off-bus", "no-such-rule"),
    "node": ("", "dgx-050"),
}
EVERY_FILTER = "/api/v1/health, every filter"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.health_page")
    parser.add_argument("databases", nargs="*", default=["sqlite", "postgres"])
    parser.add_argument("--entries", type=int, default=ENTRIES)
    parser.add_argument("--nodes", type=int, default=NODES)
    parser.add_argument("--one", action="store_true")
    options = parser.parse_args()
    if options.one:
        return _measure(options.databases[0], options.entries, options.nodes)
    print(stage.machine())
    bars: dict[str, bool] = {}
    figures: dict[str, Any] = {}
    for database in options.databases:
        few, many = (
            stage.in_child("bench.health_page", database, "--entries", str(entries), "--nodes", str(nodes), "--one")
            for entries, nodes in ((FEW, FEW_NODES), (options.entries, options.nodes))
        )
        print(f"\n{database}, {options.entries:,} active entries, {options.nodes:,} nodes")
        for address, (p95, cpu, queries, detail) in many.items():
            before = f"with {FEW} on {FEW_NODES} nodes {few[address][1]:6.1f} ms, {few[address][2]} queries"
            print(f"  {address:58} p95 {p95:7.1f} ms, CPU {cpu:6.1f} ms, {queries} queries; {before} {detail}")
        figures[database] = {address: p95 for address, (p95, *_) in many.items()}
        worst = max(figures[database].values())
        bars[database] = stage.bar(f"{database}, worst p95", worst, BAR_MS, at_least=False, unit=" ms")
        more = [address for address in many if many[address][2] > few[address][2] + 2]
        bars[f"{database}_queries"] = not more
        if more:
            print(f"  MISSED: more queries with more rows: {', '.join(more)}")
    return stage.result("health_page", bars=bars, entries=options.entries, nodes=options.nodes, **figures)


def _measure(database: str, entries: int, nodes: int) -> int:
    with stage.site(database) as place:
        os.environ.update(place.environment)
        import console.asgi  # noqa: F401  (as the web process: everything loaded)
        from bench import health_history

        user = health_history.make(
            nodes, entries, PER_ENTRY * entries, PER_ENTRY * entries, BURN_INS_PER_ENTRY * entries
        )
        print(json.dumps(_times(user, nodes)))
        return 0


def _times(user: Any, nodes: int) -> dict[str, tuple[float, float, int, str]]:
    """Return by address the p95 and the median CPU time in ms, the queries, and the slowest of the filters."""
    from django.test import Client

    client = Client(headers={"host": "127.0.0.1"})
    client.force_login(user, backend="allauth.account.auth_backends.AuthenticationBackend")
    name = f"dgx-{50:0{len(str(nodes))}d}"
    found: dict[str, tuple[float, float, int, str]] = {}
    for address in ADDRESSES:
        url = address.replace("dgx-050", name)
        times = stage.page_times(client, url, TIMES)
        found[address] = (*times, _queries(client, url), "")
    p95, cpu, slowest = max((*stage.page_times(client, url, TIMES_OF_A_FILTER), url) for url in _filters(name))
    found[EVERY_FILTER] = (p95, cpu, max(_queries(client, url) for url in _filters(name)), slowest)
    return found


def _queries(client: Any, url: str) -> int:
    """Return how many SQL queries a request takes."""
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    with CaptureQueriesContext(connection) as captured:
        client.get(url)
    return len(captured)


def _filters(node: str) -> list[str]:
    values = (tuple(node if value.startswith("dgx-") else value for value in some) for some in FILTERS.values())
    combinations = (dict(zip(FILTERS, some, strict=True)) for some in itertools.product(*values))
    return [f"/api/v1/health?{urlencode({k: v for k, v in wanted.items() if v})}" for wanted in combinations]


if __name__ == "__main__":
    sys.exit(main())
