"""Time /health and its lists with very many entries: p95 on the server, SQLite and PostgreSQL.

    python -m bench.health_page [sqlite|postgres] [--entries 10000]

Bar: with 10,000 active entries, and thirty times as many that are cleared, p95 ≤ 150 ms each for a sysadmin. Beside it
what ten active entries cost. In process, so what is timed is the server's own work.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from datetime import timedelta
from typing import Any

from bench import stage

ENTRIES, FEW, CLEARED_PER_ENTRY = 10_000, 10, 30
TIMES = 20
BAR_MS = 150.0
ADDRESSES = (
    "/health", "/health/entries", "/health/entries?state=open", "/health/entries?node=dgx-0500", "/api/v1/health",
    "/api/v1/health?state=cleared&rule=off-bus",
)  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.health_page")
    parser.add_argument("databases", nargs="*", default=["sqlite", "postgres"])
    parser.add_argument("--entries", type=int, default=ENTRIES)
    parser.add_argument("--one", action="store_true")
    options = parser.parse_args()
    if options.one:
        return _measure(options.databases[0], options.entries)
    print(stage.machine())
    bars: dict[str, bool] = {}
    figures: dict[str, Any] = {}
    for database in options.databases:
        few, many = (
            stage.in_child("bench.health_page", database, "--entries", str(entries), "--one")
            for entries in (FEW, options.entries)
        )
        print(f"\n{database}, {options.entries:,} active entries")
        for address, (p95, cpu) in many.items():
            print(f"  {address:46} p95 {p95:7.1f} ms, CPU {cpu:6.1f} ms, with {FEW} entries {few[address][1]:6.1f} ms")
        figures[database] = worst = max(p95 for p95, _ in many.values())
        bars[database] = stage.bar(f"{database}, worst p95", worst, BAR_MS, at_least=False, unit=" ms")
    return stage.result("health_page", bars=bars, entries=options.entries, **figures)


def _measure(database: str, entries: int) -> int:
    with stage.site(database) as place:
        os.environ.update(place.environment)
        import console.asgi  # noqa: F401  (as the web process: everything loaded)

        print(json.dumps(_times(_make(entries))))
        return 0


def _make(number: int) -> Any:
    from django.db import connection
    from django.utils import timezone

    from nodes.health.rules.catalogue import shipped_rules
    from nodes.models import HealthEntry, Node
    from portal.models import User

    chance, now = random.Random(7), timezone.now()
    names = [f"dgx-{place:04}" for place in range(1, 1_001)]
    Node.objects.bulk_create(Node(name=name, state="idle", gpus=8, partitions=["gpu"]) for name in names)
    rules = [rule for rule in shipped_rules().values() if rule.action != "ignore"]
    rows = []
    for place in range(number * (1 + CLEARED_PER_ENTRY)):
        rule, is_active = rules[place % len(rules)], place < number
        seen = now - timedelta(seconds=chance.randrange(86_400 if is_active else 365 * 86_400))
        is_open = is_active and chance.random() < 0.7
        rows.append(
            HealthEntry(
                node=names[place // len(rules) % len(names)], item=str(place), rule=rule.name, title=rule.title,
                severity=rule.severity, action=rule.action, count=3, first_seen=seen, last_seen=seen, opened_at=seen,
                state="open" if is_open else "watching" if is_active else "cleared",
                cleared_at=None if is_active else seen, decision="proposed" if is_open and place % 2 else "",
                evidence=[[seen.timestamp(), "xid", {"code": 79, "text": "GPU has fallen off the bus."}, 1]] * 20,
            )
        )  # fmt: skip
        if len(rows) == 5_000:
            HealthEntry.objects.bulk_create(rows)
            rows = []
    HealthEntry.objects.bulk_create(rows)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")
    return User.objects.create(username="sam", is_superuser=True)


def _times(user: Any) -> dict[str, tuple[float, float]]:
    """Return by address the p95 and the median CPU time in ms."""
    from django.test import Client

    client = Client(headers={"host": "127.0.0.1"})
    client.force_login(user, backend="allauth.account.auth_backends.AuthenticationBackend")
    return {address: stage.page_times(client, address, TIMES) for address in ADDRESSES}


if __name__ == "__main__":
    sys.exit(main())
