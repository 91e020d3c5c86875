"""Measure telemetry of 1,000 nodes × 8 GPUs × 12 fields at 1 Hz: posted to one web process, stored, merged, read.

    python -m bench.telemetry [sqlite|postgres]

Live: every agent posts its batch of 10 s once in 10 s, for a minute. Pushed: as fast as one process takes them, one and
six batches a post. Backlog: an hour of 100 nodes, 60 batches a post, while all others keep posting. Then what merging
costs and leaves on disk, and how long reading takes. The senders run beside the portal on the same machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import psutil

from bench import stage
from bench.simulated_agent import GPUS, PERIOD_S, SAMPLES, TOKEN, Sender

NODES, FIELDS = 1_000, 12
VALUES = GPUS * SAMPLES * FIELDS  # of a batch
LIVE_S = 60
CONNECTIONS = 64  # kept open by senders, which are many agents each
BACKLOG_NODES, BACKLOG_S = 100, 3_600
START = 1_796_000_256  # a Unix second, at the beginning of a window


def main(databases: Sequence[str]) -> int:
    print(stage.machine())
    bars: dict[str, bool] = {}
    figures: dict[str, Any] = {}
    for database in databases:
        print(f"{database}:")
        found = figures[database] = {}
        for part in ("--posts", "--storage"):  # a process is of one site only
            found |= stage.in_child("bench.telemetry", part, database)
        least, most = {"at_least": True}, {"at_least": False}
        for name, what, limit, unit, sense in (
            ("live_p99_ms", "a live post, p99", 250, " ms", most),
            ("pushed", "pushed", 300_000, " values/s", least),
            ("backlog_s", "an hour of 100 nodes beside live", 120, " s", most),
            ("merging_percent", "merging 1,000 nodes", 10, " % of a core", most),
            ("bytes_a_value", "bytes a value, merged", 1.3, "", most),
            ("two_days_mb", "a node's 48 h at 1 Hz", 25, " MB", most),
            ("minutes_mb", "a node's 90 days of minutes", 60, " MB", most),
            ("day_ms", "24 h of one GPU's field", 20, " ms", most),
            ("heat_ms", "64 GPUs × 24 h", 300, " ms", most),
        ):
            bars[f"{database}_{name}"] = stage.bar(f"{database}, {what}", found[name], limit, unit=unit, **sense)
    return stage.result("telemetry", bars=bars, **figures)


def measure_posts(database: str) -> int:
    """Measure what posts cost and print it as JSON."""
    found: dict[str, Any] = {}
    with stage.site(database) as place, contextlib.ExitStack() as stack:
        stage.django(place)
        agents = _enrol()
        port, pid = stack.enter_context(place.web())
        web = psutil.Process(pid)
        senders = [Sender(name, number) for number, name in enumerate(agents)]
        asyncio.run(
            _send(port, [[sender.next() for sender in senders[i::8]] for i in range(8)])
        )  # makes the rows of their GPUs
        found |= _live(port, senders, web)
        found |= _pushed(port, senders)
        found |= _backlog(port, senders)
        _check(senders)
    print(json.dumps(found))
    return 0


def measure_storage(database: str) -> int:
    """Measure what merging, thinning and reading cost and print it as JSON."""
    with stage.site(database) as place:
        stage.django(place)
        print(json.dumps(_storage_costs(place)))
    return 0


def _enrol() -> list[str]:
    from nodes.models import Agent
    from portal.models import digest

    names = [f"dgx-{i:04}" for i in range(NODES)]
    Agent.objects.bulk_create([Agent(node=name, token_digest=digest(TOKEN)) for name in names])
    return names


def _live(port: int, senders: Sequence[Sender], web: psutil.Process) -> dict[str, Any]:
    """Post as all agents do, each once in ten seconds; return what a post took and what the web process used."""
    rounds = LIVE_S // PERIOD_S
    requests = [[sender.next() for sender in senders] for _ in range(rounds)]
    before, began = sum(web.cpu_times()[:2]), time.perf_counter()
    latencies = asyncio.run(_paced(port, requests))
    took = time.perf_counter() - began
    used = (sum(web.cpu_times()[:2]) - before) / took
    rate = rounds * len(senders) * VALUES / took
    p50, p99 = (stage.percentile(latencies, share) * 1e3 for share in (0.5, 0.99))
    print(f"  live         {rate:>9,.0f} values/s at {used:.0%} of a core; a post p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    return {"live": rate, "live_core": used, "live_p50_ms": p50, "live_p99_ms": p99}


async def _paced(port: int, rounds: Sequence[Sequence[bytes]]) -> list[float]:
    """Send requests evenly over their ten seconds; late ones are sent at once, and their wait counts."""
    latencies: list[float] = []
    began = time.perf_counter()

    async def part(which: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for turn, requests in enumerate(rounds):
            for i in range(which, len(requests), CONNECTIONS):
                due = began + turn * PERIOD_S + i * PERIOD_S / len(requests)
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                await _post(reader, writer, requests[i])
                latencies.append(time.perf_counter() - due)
        writer.close()

    await asyncio.gather(*(part(i) for i in range(CONNECTIONS)))
    return latencies


def _pushed(port: int, senders: Sequence[Sender]) -> dict[str, float]:
    """Post as fast as possible, with one and with six batches per post."""
    found = {}
    for count in (1, 6):
        rates = []
        for _ in range(3):
            cuts = [senders[i : i + 250] for i in range(0, NODES, 250)]
            requests = [[sender.next(count) for sender in cut] for cut in cuts]
            began = time.perf_counter()
            asyncio.run(_send(port, requests))
            rates.append(NODES * count * VALUES / (time.perf_counter() - began))
        found[count] = statistics.median(rates)
        print(f"  pushed       {found[count]:>9,.0f} values/s, batches a post: {count}")
    return {"pushed_one": found[1], "pushed": found[6]}


def _backlog(port: int, senders: Sequence[Sender]) -> dict[str, float]:
    """Post an hour of backlog of some nodes while the others keep posting."""
    late, others = senders[:BACKLOG_NODES], senders[BACKLOG_NODES:]
    posts = BACKLOG_S // PERIOD_S // 60
    at = int(time.time()) - BACKLOG_S - 60
    backlog = [[sender.next(60, at + i * 600) for i in range(posts)] for sender in late]
    lanes = [[request for requests in backlog[i::4] for request in requests] for i in range(4)]
    live = [[sender.next() for sender in others] for _ in range(12)]

    async def both() -> tuple[float, list[float]]:
        live_posts = asyncio.create_task(_paced(port, live))
        began = time.perf_counter()
        await _send(port, lanes)
        took = time.perf_counter() - began
        return took, await live_posts

    took, latencies = asyncio.run(both())
    p99 = stage.percentile(latencies, 0.99) * 1e3
    print(f"  backlog      {took:.1f} s for an hour of {BACKLOG_NODES} nodes; live posts beside it p99 {p99:.0f} ms")
    return {"backlog_s": took, "backlog_live_p99_ms": p99}


async def _send(port: int, lanes: Sequence[Sequence[bytes]]) -> None:
    async def lane(requests: Sequence[bytes]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for request in requests:
            await _post(reader, writer, request)
        writer.close()

    await asyncio.gather(*(lane(requests) for requests in lanes))


async def _post(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> None:
    writer.write(request)
    head = await reader.readuntil(b"\r\n\r\n")
    body = await reader.readexactly(int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0]))
    if b" 200 " not in head[:15]:
        raise SystemExit(f"a post was refused: {head!r} {body!r}")


def _check(senders: Sequence[Sender]) -> None:
    """Check that everything sent is stored once."""
    from nodes.models import AgentStream, Frame

    sent = sum(sender.seq for sender in senders)
    counted = sum(AgentStream.objects.values_list("next_seq", flat=True))
    stored = Frame.objects.count()
    if not sent == counted == stored:
        raise SystemExit(f"{sent} batches were sent, {counted} are counted, {stored} are stored")


def _storage_costs(place: stage.Site) -> dict[str, float]:
    """Measure what merging costs, what is on disk after it and after thinning, and how long reading takes."""
    from nodes.models import Agent
    from nodes.telemetry import merge, thin
    from nodes.telemetry.fields import WINDOW_S

    windows, nodes = 4, 25
    for number in range(nodes):
        sender = Sender(f"dgx-{number:04}", number)
        agent = Agent.objects.create(node=sender.node)
        _insert_frames(agent, sender, START, windows * WINDOW_S + 100)
    process = psutil.Process()
    before, size = sum(process.cpu_times()[:2]), _size(place)
    gone = merge.merge(budget_s=600, now=START + windows * WINDOW_S + 100)
    used = sum(process.cpu_times()[:2]) - before
    share = used / (windows * nodes) * NODES / WINDOW_S * 100
    values = windows * nodes * WINDOW_S * GPUS * FIELDS
    stored = _chunk_bytes()
    print(f"  merging      {gone:,} frames in {used:.1f} s of CPU: {share:.1f} % of a core for {NODES:,} nodes")
    grown = (_size(place) - size) / 1e6
    print(f"  on disk      {stored / values:.2f} bytes a value with its row; the database {grown:+.0f} MB")
    found = {"merging_percent": share, "bytes_a_value": stored / values}
    found["two_days_mb"] = stored / values * 172_800 * GPUS * FIELDS / 1e6
    found |= _read()
    found["minutes_mb"] = _thinned(thin) * 129_600 * GPUS * FIELDS / 1e6
    return found


def _insert_frames(agent: Any, sender: Sender, start: int, seconds: int) -> None:
    """Insert frames as intake stores them."""
    from nodes.models import Frame, Gpu
    from nodes.telemetry import frames, wire

    gpus = Gpu.objects.bulk_create([Gpu(uuid=uuid, agent=agent, index=i) for i, uuid in enumerate(sender.uuids)])
    rows = []
    for at in range(start, start + seconds, PERIOD_S):
        post = {
            "version": 1, "stream": "0" * 16, "first": 0, "boot_id": "", "sent_at": 0.0,
            "batches": sender.batches(1, at),
        }  # fmt: skip
        batch = wire.parse(json.dumps(post).encode()).batches[0]
        data = frames.encode(at, 1, [gpu.pk for gpu in gpus], batch.host, batch.values)
        rows.append(Frame(agent=agent, at=at, until=at + SAMPLES, data=data))
    Frame.objects.bulk_create(rows, batch_size=200)
    agent.merged_to, agent.sampled_at = start, start + seconds - 1
    agent.save()


def _size(place: stage.Site) -> int:
    from django.db import connection

    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("SELECT pg_database_size(current_database())")
        else:
            cursor.execute("SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()")
        return int(cursor.fetchone()[0])


def _chunk_bytes(names: str = "%") -> float:
    """Return the bytes of GPU chunks on disk: their data, and per row what the table and its indexes take."""
    from django.db import connection

    sized = "SELECT SUM(pgsize) FROM dbstat WHERE name IN ('portal_chunk', 'chunks_of_a_rank', 'unmerged_chunks')"
    if connection.vendor == "postgresql":
        sized = "SELECT pg_total_relation_size('portal_chunk')"
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("VACUUM FULL portal_chunk")
        cursor.execute(sized)
        (size,) = cursor.fetchone()
        cursor.execute("SELECT SUM(LENGTH(data)), COUNT(*) FROM portal_chunk")
        every, rows = cursor.fetchone()
        besides = (float(size) - float(every)) / float(rows)
        cursor.execute(
            "SELECT SUM(LENGTH(data)), COUNT(*) FROM portal_chunk WHERE series_id IN"
            " (SELECT id FROM portal_series WHERE owner_kind = 'gpu' AND name LIKE %s)",
            [names],
        )
        data, rows = cursor.fetchone()
    return float(data) + besides * float(rows)


def _read() -> dict[str, float]:
    """Read a day of one GPU's field, and of 64 GPUs."""
    from nodes.models import Agent, Gpu
    from nodes.telemetry.fields import gpu_owner
    from nodes.telemetry.grid import grid
    from nodes.telemetry.read import curves

    agents = list(Agent.objects.order_by("pk")[:8])
    end = START + 86_400
    for agent in agents:
        _fill_day(agent)
    gpus = list(Gpu.objects.filter(agent__in=agents).order_by("pk"))
    keys = [(gpu_owner(gpu.pk), "watts") for gpu in gpus]
    day = _times(lambda i: curves(agents[i % 8], [keys[i % 64]], start=START, end=end, points=1_000), 40)
    heat = _times(lambda i: grid([gpu.pk for gpu in gpus], "watts", start=START, end=end, columns=240), 8)
    print(f"  reading      24 h of one GPU {day:.1f} ms, of 64 GPUs as a heat map {heat:.0f} ms (medians)")
    return {"day_ms": day, "heat_ms": heat}


def _fill_day(agent: Any) -> None:
    """Insert the other seconds of a day of one field, merged."""
    import numpy as np

    from nodes.telemetry.fields import WINDOW_S, gpu_owner
    from portal.series import store
    from portal.series.codec import Points

    noise = np.random.default_rng(agent.pk)
    for gpu in agent.gpus.all():
        series_id = store.declare(gpu_owner(gpu.pk), ["watts"])["watts"]
        rows = []
        for at in range(START + 4 * WINDOW_S, START + 86_400, WINDOW_S):
            step = np.arange(at, at + WINDOW_S, dtype=np.int64)
            value = np.asarray(640 + noise.integers(-12, 12, WINDOW_S), np.float64)
            rows.append(store.merged_row(series_id, 0, 0, Points(step, np.full(WINDOW_S, float(at)), value)))
        store.insert(rows)


def _times(do: Any, turns: int) -> float:
    """Return the median in milliseconds."""
    do(0)
    took = []
    for turn in range(turns):
        began = time.perf_counter()
        do(turn)
        took.append(time.perf_counter() - began)
    return statistics.median(took) * 1e3


def _thinned(thin: Any) -> float:
    """Return the bytes of a minute of one field (its mean, min and max) after thinning."""
    from nodes.models import Agent, Frame
    from portal.models import Chunk

    block = thin.MINUTES.block_s
    Frame.objects.all().delete()  # what comes after the windows that are looked at
    Agent.objects.update(merged_to=START + 86_400)
    thin.thin(now=START // block * block + 2 * block + thin.MINUTES.after_s, budget_s=600)
    minutes = sum(
        Chunk.objects.filter(series__owner_kind="gpu", series__name="watts@60", series__column="").values_list(
            "n", flat=True
        )
    )
    each = _chunk_bytes("watts@60") / minutes
    print(f"  thinned      {each:.2f} bytes a minute and field, with mean, min and max")
    return each


if __name__ == "__main__":
    if sys.argv[1:2] in (["--posts"], ["--storage"]):
        sys.exit({"--posts": measure_posts, "--storage": measure_storage}[sys.argv[1]](sys.argv[2]))
    sys.exit(main(sys.argv[1:] or ["sqlite", "postgres"]))
