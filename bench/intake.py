"""Taking in reports over HTTP, durably, in one web process: beside the same handler called in process, and MLflow.

    python -m bench.intake [sqlite|postgres]

Posts of 1,024 points (8 ranks × 8 series × 16 steps), each one transaction, as committed as the portal commits: SQLite
in WAL mode with synchronous NORMAL (its settings), PostgreSQL with fsync. MLflow gets 1,000 of the same points a
`log-batch` (its limit), from as many clients, on a database of the same kind. Rounds of each take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import stage

RANKS, SERIES, STEPS = 8, 8, 16
POINTS = RANKS * SERIES * STEPS
CLIENTS = 4
ROUNDS = 7
POSTS = 60  # of each client in a round
MLFLOW_POINTS, MLFLOW_POSTS = 1_000, 4
MLFLOW = ("mlflow==3.17.2", "psycopg2-binary==2.9.10")
SECRET = "the attempt's own token"
NAMES = ("loss", "step_seconds", "gradient_norm", "memory_gib", "a", "b", "c", "d")


def main(databases: Sequence[str]) -> int:
    print(stage.machine())
    bars, figures = {}, {}
    for database in databases:
        found = stage.in_child("bench.intake", "--one", database)
        in_process, mlflow = found["in_process"], found["mlflow"]
        shares = [http / inside for http, inside in zip(found["http"], in_process, strict=True)]
        times = [http / other for http, other in zip(found["http"], mlflow, strict=True)]
        print(f"{database}: points a second, rounds of {CLIENTS} clients × {POSTS} posts of {POINTS} points")
        for label, row in (("over HTTP", found["http"]), ("in process", in_process), ("MLflow", mlflow)):
            print(f"  {label:12}" + " ".join(f"{value:>9,.0f}" for value in row))
        print("  share       " + " ".join(f"{value:9.2f}" for value in shares))
        print("  × MLflow    " + " ".join(f"{value:9.1f}" for value in times))
        bars[f"{database}_share"] = stage.bar(f"{database}, share of in process", statistics.median(shares), 0.4)
        bars[f"{database}_mlflow"] = stage.bar(f"{database}, times MLflow", statistics.median(times), 10)
        figures[database] = {
            "points_per_second": statistics.median(found["http"]),
            "share_of_in_process": statistics.median(shares),
            "times_mlflow": statistics.median(times),
            "post_p50_ms": stage.percentile(found["latencies"], 0.5) * 1e3,
            "post_p99_ms": stage.percentile(found["latencies"], 0.99) * 1e3,
        }
        latency = figures[database]
        print(f"  one post: p50 {latency['post_p50_ms']:.1f} ms, p99 {latency['post_p99_ms']:.1f} ms")
    return stage.result("intake", bars=bars, **figures)


def measure(database: str) -> int:
    """Run all rounds on one database and print the figures as JSON."""
    found: dict[str, list[float]] = {"http": [], "in_process": [], "mlflow": [], "latencies": []}
    with stage.site(database) as place, contextlib.ExitStack() as stack:
        stage.django(place)
        from jobs.intake import reports

        port, _ = stack.enter_context(place.web())
        rival = stack.enter_context(_mlflow(place, database))
        attempts = _attempts(2 * CLIENTS)
        over_http, inside = attempts[:CLIENTS], attempts[CLIENTS:]
        for turn in range(ROUNDS + 1):
            bodies = [_body(turn * POSTS + i) for i in range(POSTS)]
            requests = [[_request(port, pk, body) for body in bodies] for pk in over_http]
            began = time.perf_counter()
            latencies = asyncio.run(_send(port, requests))
            http = CLIENTS * POSTS * POINTS / (time.perf_counter() - began)
            began = time.perf_counter()
            for body in bodies:
                for pk in inside:
                    reports.receive(pk, f"Bearer {SECRET}", "gzip", [body])
            in_process = CLIENTS * POSTS * POINTS / (time.perf_counter() - began)
            other = asyncio.run(rival.round(turn))
            if turn:  # the first warms up
                for name, value in (("http", http), ("in_process", in_process), ("mlflow", other)):
                    found[name].append(value)
                found["latencies"] += latencies
        _check(attempts)
    print(json.dumps(found))
    return 0


def _attempts(number: int) -> list[int]:
    from tests.jobs.reporting import attempt_of, job_of

    return [attempt_of(job_of(), secret=SECRET).pk for _ in range(number)]


def _body(seq: int) -> bytes:
    """The batch `seq` of each of 8 ranks, as a shipper sends it."""
    streams = [
        {
            "id": f"{rank:016x}", "incarnation": 0, "rank": rank, "node": "dgx-01", "boot_id": "b",
            "restart_count": 0, "first": seq, "times": [1_700_000_000.0 + seq], "end": False,
        }
        for rank in range(RANKS)
    ]  # fmt: skip
    steps = list(range(seq * STEPS, (seq + 1) * STEPS))
    columns = {
        "runs": [[rank, 0, STEPS] for rank in range(RANKS)],
        "step": steps * RANKS,
        "value": [_value(rank, step) for rank in range(RANKS) for step in steps],
    }
    post = {"version": 1, "streams": streams, "series": dict.fromkeys(NAMES, columns), "events": []}
    return gzip.compress(json.dumps(post).encode(), 6)


def _value(rank: int, step: int) -> float:
    """Something like a loss, with all its digits."""
    return 2 + 3 / (1 + step / 500) + ((step * 7919 + rank * 104729) % 1000) / 7000


def _request(port: int, attempt: int, body: bytes) -> bytes:
    head = (
        f"POST /api/v1/attempts/{attempt}/reports HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Authorization: Bearer {SECRET}\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _send(port: int, clients: Sequence[Sequence[bytes]]) -> list[float]:
    """Send each client's requests in turn over its own connection; return the seconds of each answer."""
    latencies: list[float] = []

    async def send_all(requests: Sequence[bytes]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for request in requests:
            began = time.perf_counter()
            writer.write(request)
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            body = await reader.readexactly(length)
            if b" 200 " not in head[:15]:
                raise SystemExit(f"a post was refused: {head!r} {body!r}")
            latencies.append(time.perf_counter() - began)
        writer.close()

    await asyncio.gather(*(send_all(requests) for requests in clients))
    return latencies


class _mlflow:
    """An MLflow tracking server on a database of the same kind."""

    def __init__(self, place: stage.Site, database: str) -> None:
        self.place, self.database = place, database

    def __enter__(self) -> _mlflow:
        python = stage.others("mlflow", *MLFLOW)
        self.port, log = stage.free_port(), self.place.home / "mlflow.log"
        store = f"sqlite:///{self.place.home}/mlflow.sqlite3"
        if self.database == "postgres":
            url = self.place.environment["DATABASE_URL"]
            folder = url.split("host=")[1]
            subprocess.run(["createdb", "-h", folder, "-U", "vigil", "mlflow"], check=True)
            store = f"postgresql+psycopg2://vigil@/mlflow?host={folder}"
        command = [
            python, "-m", "mlflow", "server", "--backend-store-uri", store, "--host", "127.0.0.1",
            "--port", self.port, "--workers", "1", "--default-artifact-root", self.place.home / "artifacts",
        ]  # fmt: skip
        self._stack = contextlib.ExitStack()
        child = self._stack.enter_context(stage.process(command, log))
        stage.wait_for_port(self.port, child, log)
        self.runs = asyncio.run(self._begin(log))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    async def _begin(self, log: Path) -> list[str]:
        runs = []
        for _ in range(CLIENTS):
            answer = await self._post("runs/create", {"experiment_id": "0"})
            runs.append(answer["run"]["info"]["run_id"])
        return runs

    async def _post(self, path: str, body: Any) -> Any:
        import httpx

        async with httpx.AsyncClient(timeout=60) as client:
            answer = await client.post(f"http://127.0.0.1:{self.port}/api/2.0/mlflow/{path}", json=body)
            answer.raise_for_status()
            return answer.json()

    async def round(self, turn: int) -> float:
        """Points a second of log-batch, from as many clients."""
        lanes = []
        for run in self.runs:
            requests = []
            for i in range(MLFLOW_POSTS):
                body = json.dumps({"run_id": run, "metrics": _metrics(turn * MLFLOW_POSTS + i)}).encode()
                head = (
                    f"POST /api/2.0/mlflow/runs/log-batch HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n"
                    f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
                )
                requests.append(head.encode() + body)
            lanes.append(requests)
        began = time.perf_counter()
        await _send(self.port, lanes)
        return CLIENTS * MLFLOW_POSTS * MLFLOW_POINTS / (time.perf_counter() - began)


def _metrics(seq: int) -> list[dict[str, Any]]:
    steps = range(seq * STEPS, (seq + 1) * STEPS)
    found = [
        {"key": f"{name}/{rank}", "value": _value(rank, step), "timestamp": 1_700_000_000_000 + seq, "step": step}
        for name in NAMES
        for rank in range(RANKS)
        for step in steps
    ]
    return found[:MLFLOW_POINTS]


def _check(attempts: Sequence[int]) -> None:
    """Everything that was sent is there, once."""
    from django.db.models import Sum

    from portal.models import Chunk

    total = Chunk.objects.aggregate(total=Sum("n"))["total"]
    sent = len(attempts) * (ROUNDS + 1) * POSTS * POINTS
    if total != sent:
        raise SystemExit(f"{sent} points were sent, {total} are stored")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        sys.exit(measure(sys.argv[2]))
    sys.exit(main(sys.argv[1:] or ["sqlite", "postgres"]))
