"""Time the way from the trainer to a frame at the browser's socket, with default flush settings, by stages.

    python -m bench.live
    python -m bench.live --tail      the same where nodes cannot post: the worker reads the spools, once a second

Two ranks log a step every 50 ms with the trainer's own Reporter; the shipper posts what they spool; one web process
takes it in and fans it out; a socket receives. Nothing is faked or shortened. Rank 1 tells an event now and then: an
event is written at once, and the points before it with it, so rank 0, whose points are timed, tells none. Stages, by
the same clock: until the batch is made to be written, until it is committed and published (written, read, posted,
stored), until the frame is in the socket. Bar: p95 ≤ 1.5 s for points, ≤ 5 s where they are read off the disk; events
do not wait for a flush.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench import stage
from bench.shipping import SECRET, run_directory, shipper

SECONDS = 25.0
EVERY = 0.05
WARM_S = 3.0  # of the beginning, left out
RANKS = 2
BAR_S = 1.5
TAIL_BAR_S = 5.0
TAIL_EVERY = 1.0


def main(*, is_tailed: bool = False) -> int:
    print(stage.machine())
    with stage.site() as place, ExitStack() as stack:
        stage.django(place)
        port, _ = stack.enter_context(place.web())
        attempt, job, token = _attempt()
        run_dir = _run_dir(job, place.home / "runs") if is_tailed else Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="vigil-live-"))
        )  # fmt: skip
        attempt_dir = run_directory(run_dir, attempt, port)
        published = _Published(place.environment["REDIS_URL"], job)
        if is_tailed:
            _tail(attempt, stack, place)
        else:
            stack.enter_context(shipper(run_dir, attempt_dir, place))
        ranks = []
        for number in range(RANKS):
            command = [sys.executable, "-m", "bench.live", "--rank", number, attempt_dir]
            ranks.append(stack.enter_context(stage.process(command, run_dir / f"{number}.log")))
        arrived = asyncio.run(_listen(port, job, token, ranks))
        spooled = _spooled(attempt_dir)
        logged: dict[str, float] = {}
        for number in range(RANKS):
            logged |= json.loads((attempt_dir / f"logged-{number}.json").read_text())
    name, limit = ("live --tail", TAIL_BAR_S) if is_tailed else ("live", BAR_S)
    return _print_result(logged, spooled, published.times, arrived, name=name, limit=limit)


def _run_dir(job: int, runs: Path) -> Path:
    """Makes the run directory where the worker looks for it."""
    from jobs.models import Job

    directory = f"default/{job}-aaaaaa"
    Job.objects.filter(pk=job).update(directory=directory)
    (runs / directory).mkdir(parents=True)
    return runs / directory


def _tail(attempt: int, stack: ExitStack, place: stage.Site) -> None:
    """The worker's part, in a process of its own that looks as often as beat ticks."""
    from jobs.models import Attempt

    Attempt.objects.filter(pk=attempt).update(tailed=True, scheduler_id="1", directory="attempt-1")
    command = [sys.executable, "-m", "bench.live", "--ticks"]
    stack.enter_context(stage.process(command, place.home / "tail.log", environment=place.environment))


def ticks() -> None:
    """Looks at the spools, once a second, for ever."""
    import django

    django.setup()
    from jobs.intake import tail

    began, number = time.monotonic(), 0
    while True:
        tail.tick()
        number += 1
        time.sleep(max(0.0, began + number * TAIL_EVERY - time.monotonic()))


def rank(number: int, attempt_dir: Path) -> None:
    """Run one rank: a step every 50 ms, for rank 1 also an event a second; note when each was logged."""
    from training.reporting.reporter import Reporter

    reporter = Reporter(attempt_dir, rank=number, incarnation=0, node="here")
    logged: dict[str, float] = {}
    began = time.monotonic()
    step = 0
    while time.monotonic() - began < SECONDS:
        step += 1
        if number == 1 and step % 20 == 0:
            logged[f"event {step}"] = time.time()
            reporter.event("note", number=step)
        if number == 0:
            logged[f"step {step}"] = time.time()
        reporter.log(step, loss=1 / step, step_seconds=EVERY)
        time.sleep(max(0.0, began + step * EVERY - time.monotonic()))
    reporter.close()
    (attempt_dir / f"logged-{number}.json").write_text(json.dumps(logged))


def _attempt() -> tuple[int, int, str]:
    from portal.models import Token, User
    from tests.jobs.reporting import attempt_of, job_of

    attempt = attempt_of(job_of(), secret=SECRET)
    User.objects.filter(pk=attempt.job.owner_id).update(is_superuser=True)
    return attempt.pk, attempt.job_id, Token.issue(attempt.job.owner, "bench")[1]


class _Published:
    """The times at which each step of rank 0, and each event, went through Redis, which is right after its commit."""

    def __init__(self, url: str, job: int) -> None:
        import redis

        from jobs import live

        self.times: dict[str, float] = {}
        self._live = live
        self._pubsub = redis.Redis.from_url(url).pubsub()  # type: ignore[no-untyped-call]
        self._pubsub.subscribe(live.job_topic(job))
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        import redis

        with contextlib.suppress(redis.RedisError):  # it goes before this thread does
            for message in self._pubsub.listen():
                if message["type"] == "message":
                    now = time.time()
                    frame, _ = self._live.split(message["data"])
                    for what in _contents(frame):
                        self.times.setdefault(what, now)


def _contents(frame: bytes) -> list[str]:
    """Rank 0's steps, and events, in a frame."""
    from jobs import live

    header, data = live.unpack(frame)
    found = [f"event {event['number']}" for event in header["events"] if event["kind"] == "note"]
    for entry, columns in zip(header["series"], live.columns_of(header, data), strict=True):
        if entry["name"] == "loss" and entry["kind"] == "value" and entry["rank"] == 0:
            found += [f"step {int(step)}" for step in columns["step"]]
    return found


async def _listen(port: int, job: int, token: str, ranks: list[Any]) -> dict[str, float]:
    """Notes when each step of rank 0, and each event, reached the socket, until all ranks have ended and all came."""
    from websockets.asyncio.client import connect

    arrived: dict[str, float] = {}
    headers = {"Authorization": f"Bearer {token}"}
    async with connect(f"ws://127.0.0.1:{port}/ws/jobs/{job}", additional_headers=headers, compression=None) as socket:

        async def read() -> None:
            async for message in socket:
                now = time.time()
                if isinstance(message, bytes):
                    for what in _contents(message):
                        arrived.setdefault(what, now)

        reading = asyncio.create_task(read())
        while any(child.poll() is None for child in ranks):
            await asyncio.sleep(0.1)
        await asyncio.sleep(3)
        reading.cancel()
    if any(child.returncode for child in ranks):
        raise SystemExit("a rank failed")
    return arrived


def _spooled(attempt_dir: Path) -> dict[str, float]:
    """The times at which the batch with each step of rank 0, and each event, was made to be written."""
    times: dict[str, float] = {}
    for path in (attempt_dir / "spool").glob("*.jsonl"):
        for line in path.read_text().splitlines()[1:]:
            batch = json.loads(line)
            if path.name.startswith("0.0."):
                times |= {f"step {step}": batch["time"] for step, _ in batch.get("series", {}).get("loss", [])}
            notes = [event for event in batch.get("events", []) if event["kind"] == "note"]
            times |= {f"event {event['number']}": batch["time"] for event in notes}
    return times


def _print_result(
    logged: dict[str, float],
    spooled: dict[str, float],
    published: dict[str, float],
    arrived: dict[str, float],
    *,
    name: str,
    limit: float,
) -> int:
    began = min(logged.values())
    wanted = [what for what, at in logged.items() if at - began > WARM_S]
    if missing := [what for what in wanted if what not in arrived]:
        raise SystemExit(f"{len(missing)} of {len(wanted)} never came: {missing[:5]}")
    figures: dict[str, Any] = {}
    for kind in ("step", "event"):
        items = [what for what in wanted if what.startswith(kind)]
        stages = {
            "until spooled": [spooled[w] - logged[w] for w in items],
            "until published": [published[w] - spooled[w] for w in items],
            "until in the socket": [arrived[w] - published[w] for w in items],
            "in all": [arrived[w] - logged[w] for w in items],
        }
        print(f"{len(items)} {kind}s, ms")
        for label, seconds in stages.items():
            p50, p95 = statistics.median(seconds) * 1e3, stage.percentile(seconds, 0.95) * 1e3
            print(f"  {label:20} median {p50:7.1f}, p95 {p95:7.1f}, most {max(seconds) * 1e3:7.1f}")
            figures[f"{kind}_{label.replace(' ', '_')}_p95_ms"] = p95
    p95_s = figures["step_in_all_p95_ms"] / 1e3
    bars = {
        "point_p95": stage.bar("a point at the socket, p95", p95_s, limit, at_least=False, unit=" s", has_timers=True)
    }
    return stage.result(name, bars=bars, **figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int)
    parser.add_argument("--tail", action="store_true")
    parser.add_argument("--ticks", action="store_true")
    parser.add_argument("attempt_dir", nargs="?", type=Path)
    options = parser.parse_args()
    if options.rank is not None:
        rank(options.rank, options.attempt_dir)
    elif options.ticks:
        ticks()
    else:
        sys.exit(main(is_tailed=options.tail))
