"""Measure how slow this machine is, by a fixed piece of work timed in the same run as a bench.

Bars in milliseconds and seconds are those of the machine on which they were set (docs/reference/benchmarks.md). On a
slower one they are multiplied by `slowness()`: what is judged is the ratio of a bench's work to this work in the same
run.
"""

from __future__ import annotations

import json
import re
import sqlite3
import time

REFERENCE_MS = 21.0
"""What the work takes where the bars were set (2 cores, AMD EPYC, 2026-11-28): the best of many times."""
TIMES = 15


def slowness() -> float:
    """Return how many times the reference's CPU time the same work takes here, the best of some times."""
    best = min(_milliseconds() for _ in range(TIMES))
    return best / REFERENCE_MS


def _milliseconds() -> float:
    """Time what our benches mostly do: parse JSON, match text, call functions, read and write SQLite."""
    began = time.process_time()
    rows = [{"step": step, "name": f"loss/{step % 7}", "value": step / 3} for step in range(8_000)]
    parsed = json.loads(json.dumps(rows))
    pattern = re.compile(r"loss/(\d)")
    groups = [int(match[1]) for row in parsed if (match := pattern.match(row["name"]))]
    with sqlite3.connect(":memory:") as database:
        database.execute("CREATE TABLE point (step INTEGER PRIMARY KEY, kind INTEGER, value REAL)")
        points = ((row["step"], group, row["value"]) for row, group in zip(parsed, groups, strict=True))
        database.executemany("INSERT INTO point VALUES (?, ?, ?)", points)
        for kind in range(7):
            database.execute("SELECT avg(value), max(step) FROM point WHERE kind = ?", (kind,)).fetchone()
    database.close()
    return (time.process_time() - began) * 1e3


if __name__ == "__main__":
    print(f"{slowness():.2f} times the reference's CPU time")
