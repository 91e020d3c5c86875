"""Series: a million points to a thousand, what compaction costs others, and 1,024 ranks × 8 series.

    python -m bench.series [sqlite|postgres]

Bar: a 1 M-point series to 1,000 points ≤ 15 ms on the server (median; the rows read, the answer encoded).
"""

from __future__ import annotations

import gzip
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from bench import stage

MILLION = 1_000_000
READS = 41
BAR_MS = 15.0
NODES, RANKS, SERIES, STEPS = 128, 8, 8, 4  # a post: one node's ranks, four steps of eight series
ROUNDS = 3  # of every node posting once
SECRET = "the attempt's own token"


def main(databases: Sequence[str]) -> int:
    print(stage.machine())
    bars, figures = {}, {}
    for database in databases:
        found = stage.in_child("bench.series", "--one", database)
        print(f"{database}, 1 M points written in {found['write_s']:.1f} s, merged in {found['compact_s']:.1f} s")
        print(
            f"  {found['bytes_a_point']:.1f} bytes a point; reports waited {found['wait_ms']:.0f} ms at most meanwhile"
        )
        for label, key in (
            ("1 M points to 1,000", "million"),
            ("its last 100,000 to 1,000", "window"),
            ("its last 900, exact", "exact"),
            ("1,024 ranks: one rank's curve", "rank"),
            ("1,024 ranks: the band", "band"),
        ):
            row = found[key]
            print(f"  {label:30} median {statistics.median(row):6.1f} ms, p95 {stage.percentile(row, 0.95):6.1f} ms")
        print(
            f"  1,024 ranks × 8 series: {found['world_points_per_second']:,.0f} points a second taken,"
            f" {found['world_posts_per_second']:.0f} posts; a step a second of that job is {1024 * 8:,} points"
        )
        median = statistics.median(found["million"])
        bars[f"{database}_million_ms"] = stage.bar(
            f"{database}, 1 M to 1,000", median, BAR_MS, at_least=False, unit=" ms"
        )
        figures[database] = {
            "million_ms": median,
            "million_p95_ms": stage.percentile(found["million"], 0.95),
            "window_ms": statistics.median(found["window"]),
            "band_1024_ms": statistics.median(found["band"]),
            "bytes_a_point": found["bytes_a_point"],
            "world_points_per_second": found["world_points_per_second"],
            "longest_wait_ms": found["wait_ms"],
        }
    return stage.result("series", bars=bars, **figures)


def measure(database: str) -> int:
    with stage.site(database) as place:
        stage.django(place)
        found = _million() | _world()
    print(json.dumps(found))
    return 0


def _million() -> dict[str, Any]:
    """Write one rank's million points in a hundred flushes at a time of ten each, and time reads."""
    import numpy as np
    from django.db import connection

    from portal.models import Chunk
    from portal.series import compact, read, store
    from portal.series.store import NewPoints

    owner = ("attempt", 1)
    rng = np.random.default_rng(0)
    step = np.arange(MILLION, dtype=np.int64)
    value = (2 + 3 / (1 + step / 5e4) + rng.normal(0, 0.05, MILLION)).astype(np.float32).astype(np.float64)
    ids = store.declare(owner, ["loss"])
    began = time.perf_counter()
    for at in range(0, MILLION, 1_000):
        runs = [(0, 1.7e9 + (at + i) / 10, 10) for i in range(0, 1_000, 10)]
        store.append(ids, [NewPoints("loss", 0, runs, step[at : at + 1_000], value[at : at + 1_000])])
    write_s = time.perf_counter() - began
    longest = _note_longest_transaction(compact)
    began = time.perf_counter()
    while compact.compact(600, quiet=lambda owners: owners):
        pass
    compact_s = time.perf_counter() - began
    data = sum(len(row) for row in Chunk.objects.filter(kind=Chunk.Kind.MERGED).values_list("data", flat=True))
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("VACUUM ANALYZE portal_chunk")

    def shown(**options: Any) -> Callable[[], Any]:
        def read_curve() -> None:
            curve = read.curve([owner], "loss", points=1_000, **options)
            columns = {name: getattr(curve, name) for name in ("step", "value", "min", "max", "mean")}
            msgspec.json.encode({name: column.tolist() for name, column in columns.items() if column is not None})

        return read_curve

    return {
        "write_s": write_s,
        "compact_s": compact_s,
        "wait_ms": max(longest, default=0.0),
        "bytes_a_point": data / MILLION,
        "million": _timed(shown()),
        "window": _timed(shown(start=MILLION - 100_000)),
        "exact": _timed(shown(start=MILLION - 900)),
    }


def _note_longest_transaction(compact: Any) -> list[float]:
    """Print the milliseconds of the compaction's transactions: reports wait that long for SQLite's lock."""
    longest: list[float] = []
    write = compact._write

    def timed(swap: Any) -> int:
        began = time.perf_counter()
        gone: int = write(swap)
        longest.append((time.perf_counter() - began - compact._REST_S) * 1e3)
        return gone

    compact._write = timed
    return longest


def _world() -> dict[str, Any]:
    """Post four steps of eight series from every node's shipper of a job of 1,024 ranks, again and again."""
    from jobs.intake import reports
    from portal.series import bands_read, compact, read
    from tests.jobs.reporting import attempt_of, job_of

    attempt = attempt_of(job_of(), secret=SECRET).pk
    bodies = [_body(turn, node) for turn in range(ROUNDS) for node in range(NODES)]
    began = time.perf_counter()
    for body in bodies:
        reports.receive(attempt, f"Bearer {SECRET}", "gzip", [body])
    seconds = time.perf_counter() - began
    owners = [reports.owner_of(attempt)]
    band = _timed(lambda: bands_read.band(owners, "loss"), 9)
    while compact.compact(600, quiet=lambda owners: owners):
        pass
    made = bands_read.band(owners, "loss")
    if len(made.step) != ROUNDS * STEPS or set(made.worst_rank.tolist()) != {NODES * RANKS - 1}:
        raise SystemExit(f"the band is wrong: {made}")
    return {
        "world_points_per_second": len(bodies) * RANKS * SERIES * STEPS / seconds,
        "world_posts_per_second": len(bodies) / seconds,
        "band": band,
        "rank": _timed(lambda: read.curve(owners, "loss", rank=1000), 9),
    }


def _body(turn: int, node: int) -> bytes:
    ranks = range(node * RANKS, (node + 1) * RANKS)
    steps = list(range(turn * STEPS, (turn + 1) * STEPS))
    streams = [
        {
            "id": f"{rank:016x}", "incarnation": 0, "rank": rank, "node": f"dgx-{node:03}", "boot_id": "b",
            "restart_count": 0, "first": turn, "times": [1_700_000_000.0 + turn], "end": False,
        }
        for rank in ranks
    ]  # fmt: skip
    columns = {
        "runs": [[i, 0, STEPS] for i in range(RANKS)],
        "step": steps * RANKS,
        "value": [2 + step / 7 + rank / 1e4 for rank in ranks for step in steps],
    }
    names = ["loss", "step_seconds", "gradient_norm", "memory_gib", "a", "b", "c", "d"]
    post = {"version": 1, "streams": streams, "series": dict.fromkeys(names, columns), "events": []}
    return gzip.compress(json.dumps(post).encode(), 6)


def _timed(read: Callable[[], Any], times: int = READS) -> list[float]:
    """Return the milliseconds of each call but the first."""
    found = []
    for _ in range(times + 1):
        began = time.perf_counter()
        read()
        found.append((time.perf_counter() - began) * 1e3)
    return found[1:]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        sys.exit(measure(sys.argv[2]))
    sys.exit(main(sys.argv[1:] or ["sqlite", "postgres"]))
