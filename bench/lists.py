"""Time every address that lists or counts on a site with a long history: p95 and server CPU, SQLite and PostgreSQL.

    python -m bench.lists [sqlite|postgres] [--jobs 1000000] [--times 20]

Bar: with 1,000,000 jobs p95 ≤ 150 ms each, for a sysadmin, a lead of the project that has half of all jobs, and one of
a project with 300; the rows made within five minutes; and the follower's tick, taking in reports and compaction at most
1.2 times what they take on an empty site (bench/empty_site.py). Also what 10,000 jobs cost, for what a page costs
shall not grow with history. In process, so what is timed is the server's own work: every middleware, the queries, the
template or the JSON. CPU time is our process's and that of PostgreSQL's that answers it: where others load the machine
it says more than time does.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from contextlib import suppress
from typing import Any

from bench import stage

JOBS, SMALL = 1_000_000, 10_000
TIMES = 20
BAR_MS, BAR_MADE_S, BAR_RATIO = 150.0, 300.0, 1.2
BARRED = ("tick", "tick where nothing runs", "intake", "compaction", "compaction where nothing is ripe")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.lists")
    parser.add_argument("databases", nargs="*", default=["sqlite", "postgres"])
    parser.add_argument("--jobs", type=int, default=JOBS)
    parser.add_argument("--times", type=int, default=TIMES)
    parser.add_argument("--one", action="store_true")
    parser.add_argument("--turns", action="store_true")
    options = parser.parse_args()
    if options.turns:
        return _take_turns()
    if options.one:
        return _measure(options.databases[0], options.jobs, options.times)
    print(stage.machine())
    bars: dict[str, bool] = {}
    figures: dict[str, Any] = {}
    for database in options.databases:
        small, large = (
            stage.in_child("bench.lists", database, "--jobs", str(jobs), "--times", str(options.times), "--one")
            for jobs in (SMALL, options.jobs)
        )
        bars |= _print_figures(database, options.jobs, small, large)
        figures[database] = {"made_s": sum(large["made_s"].values())} | _most(large)
    return stage.result("lists", bars=bars, jobs=options.jobs, **figures)


def _print_figures(database: str, jobs: int, small: dict[str, Any], large: dict[str, Any]) -> dict[str, bool]:
    print(f"\n{database}, {jobs:,} jobs")
    print(f"{'who':9}{'address':76} {'p95':>9} {'of bar':>7} {'CPU':>8} {'of bar':>7} {'of 10,000':>10}")
    for who, addresses in large["p95_ms"].items():
        for address, p95 in addresses.items():
            cpu = large["cpu_ms"][who][address]
            before = small["cpu_ms"][who].get(address, cpu)
            print(f"{who:9}{address:76} {p95:7.1f}ms {p95 / BAR_MS:7.2f} {cpu:6.1f}ms {cpu / BAR_MS:7.2f} "
                  f"{cpu / max(before, 0.1):9.1f}×")  # fmt: skip
    print("of CPU time, the least of many      history      empty  median ratio")
    for what, found in large["history"].items():
        print(f"  {what:32} {found['with_history']:7.2f}ms {found['empty']:8.2f}ms {found['ratio']:12.2f}×")
    most = _most(large)
    made = sum(large["made_s"].values())
    print(f"  most CPU time of one: {most['most_cpu_ms']:.1f} ms; made in {large['made_s']}")
    return {
        f"{database}_p95": stage.bar(f"{database}, worst p95", most["worst_p95_ms"], BAR_MS, at_least=False, unit="ms"),
        f"{database}_made": stage.bar(f"{database}, rows made", made, BAR_MADE_S, at_least=False, unit=" s"),
        f"{database}_history": stage.bar(
            f"{database}, with the history",
            max(large["history"][what]["ratio"] for what in BARRED),
            BAR_RATIO,
            at_least=False,
            unit="×",
        ),
    }


def _most(found: dict[str, Any]) -> dict[str, float]:
    p95, cpu = (
        max(value for addresses in found[what].values() for value in addresses.values())
        for what in ("p95_ms", "cpu_ms")
    )
    return {"worst_p95_ms": p95, "most_cpu_ms": cpu}


def _measure(database: str, jobs: int, times: int) -> int:
    with stage.site(database) as place:
        os.environ.update(place.environment)
        import console.asgi  # noqa: F401  (as the web process: everything loaded, and out of the collector's way)
        from bench import empty_site, history

        lab, made = history.make(jobs)
        p95, cpu = timed({"sysadmin": lab.sysadmin, "large": lab.large, "tiny": lab.tiny}, times)
        found = {"p95_ms": p95, "cpu_ms": cpu, "made_s": made}
        if jobs > SMALL:
            empty_site.end_all()
            with stage.site(database) as empty:
                found["history"] = empty_site.compare(place, empty)
        print(json.dumps(found))
        return 0


def _take_turns() -> int:
    import console.asgi  # noqa: F401
    from bench import empty_site

    empty_site.take_turns()
    return 0


def timed(people: dict[str, Any], times: int) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
    """Milliseconds by person and address: the 95th percentile of time, and the mean of CPU time."""
    from bench import addresses

    p95: dict[str, dict[str, float]] = {}
    cpu: dict[str, dict[str, float]] = {}
    for who, user in people.items():
        p95[who], cpu[who] = {}, {}
        for route, queries in addresses.requests_by_route().items():
            if route.startswith("admin/") and not user.is_superuser:
                continue
            for query in queries:
                with suppress(_NotVisible):
                    label = f"/{route} {query}".rstrip()
                    p95[who][label], cpu[who][label] = _time(user, route, query, times)
    return p95, cpu


class _NotVisible(Exception):
    """The page is not for this person, or not there."""


def _time(user: Any, route: str, query: str, times: int) -> tuple[float, float]:
    from django.test import Client

    from bench.empty_site import spent

    client = Client(headers={"host": "127.0.0.1"})
    client.force_login(user, backend="allauth.account.auth_backends.AuthenticationBackend")
    address = _exact(client, route, query)
    for _ in range(2):
        status = client.get(address).status_code
        if status in {302, 403}:  # of few rows there is no such page of records
            raise _NotVisible
        assert status == 200, (address, status)
    taken, cpu = [], spent()
    for _ in range(times):
        began = time.perf_counter()
        client.get(address)
        taken.append((time.perf_counter() - began) * 1000)
    return stage.percentile(taken, 0.95), (spent() - cpu) * 1000 / times


def _exact(client: Any, route: str, query: str) -> str:
    """Return the address with an existing object in each placeholder, and a cursor where the query has one."""
    address = f"/{route}"
    if "<" in route:
        place, lists = ("<int:sweep_id>", "sweeps?") if "sweep_id" in route else ("<int:job_id>", "jobs?state=ended&")
        found = client.get(f"/api/v1/{lists}limit=1").json()["items"]
        if not found:
            raise _NotVisible
        address = address.replace(place, str(found[0]["id"]))
    if paged := re.fullmatch(r"PAGE (\d+) ?(.*)", query):
        return _deep(client, f"{address}?{paged[2]}", int(paged[1]))
    return f"{address}?{query}" if query else address


def _deep(client: Any, address: str, pages: int) -> str:
    """Follow so many cursors and return that page's address, or the last page's."""
    name, cursor = "cursor" if address.startswith("/api/") else "after", ""
    for _ in range(pages):
        answer = client.get(f"{address}&{name}={cursor}")
        following = answer.json()["next"] if name == "cursor" else _next(answer.text)
        if following is None:
            break
        cursor = following
    return f"{address}&{name}={cursor}"


def _next(html: str) -> str | None:
    found = re.search(r"[?&;]after=([A-Za-z0-9_=%-]+)", html)
    return found[1] if found else None


if __name__ == "__main__":
    sys.exit(main())
