"""The largest posts that an agent's or an attempt's token may legally send, by kind of event (`bench.writer_hold`)."""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from training.federation.tables import CLIENT_COLUMNS, ROUND_COLUMNS, ClientNames, RoundTable, SplitTable

Event = dict[str, Any]
SIZES = (100, 2_000)
"""Events of a post: an ordinary one, and the most that one may hold."""

EVENTS_PER_BATCH = 200
LARGE_A_BATCH = 17  # of 60 kB: just under 1 MiB, the most of a batch
INFLATED, COMPRESSED = 15 * 1024 * 1024, 960 * 1024  # just under the limits of the intake doors
ROUNDS, NAMED = 400, 1_000  # of one `round.clients`


def telemetry_bodies(now: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, batches and boot id) for every kind of event and for samples."""
    for kind, make in _MACHINE_EVENTS.items():
        for size in SIZES:
            events = list(_fitting(make(i, now) for i in range(size)))
            cut = [events[at : at + EVENTS_PER_BATCH] for at in range(0, len(events), EVENTS_PER_BATCH)]
            yield f"{kind} × {len(events)}", {"batches": [{"at": int(now), "n": 0, "events": some} for some in cut]}
    yield "samples, 60 × 64 GPUs", {"batches": [_samples(int(now) - 600 + 10 * i, "00") for i in range(60)]}
    yield "samples, 128 new GPUs", {"batches": [_samples(int(now) - 600 + 10 * i, f"a{i % 2}") for i in range(60)]}
    yield "host × 60", {"batches": [_host(int(now) - 600 + 10 * i) for i in range(60)]}
    yield "processes × 60", {"batches": [_processes(int(now) - 600 + 10 * i) for i in range(60)]}


def report_bodies(now: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, body) for every kind of event, in small batches and in full ones, for points, and for streams."""
    for kind, make in _JOB_EVENTS.items():
        for size in SIZES:
            events = list(_fitting({**make(i, now), "kind": kind.partition(",")[0], "time": now} for i in range(size)))
            for each in (1, LARGE_A_BATCH if "kB" in kind else 100):
                yield f"{kind} × {len(events)}, {each} a batch", report_post(events, {}, events_a_batch=each)
    for series, points in ((1_000, 50), (1, 50_000), (50_000, 1)):
        columns = {f"s{i}": (list(range(points)), [0.1 * i] * points) for i in range(series)}
        yield f"series, {series:,} × {points:,} points", report_post([], columns, events_a_batch=100)
    yield "2,048 new streams of an event each", streams_post(2_048, now)


def packed(body: Mapping[str, Any]) -> bytes:
    return gzip.compress(json.dumps(body).encode(), 6)


def _fitting(events: Iterable[Event]) -> Iterator[Event]:
    """Yield as many of them as a post may hold in bytes, packed and not."""
    size, compressor = 0, zlib.compressobj(6)
    packed_size = 0
    for event in events:
        text = json.dumps(event).encode()
        size += len(text) + 64
        packed_size += len(compressor.compress(text)) + 32
        if size > INFLATED or packed_size > COMPRESSED:
            return
        yield event


def _uuid(group: str, i: int) -> str:
    return f"GPU-{group}{i:06x}-0000-0000-0000-000000000000"


def _facts(i: int, now: float) -> Event:
    gpus = [{"uuid": _uuid(f"{i % 2:02x}", slot), "index": slot, "name": "NVIDIA H100"} for slot in range(64)]
    return {"kind": "facts", "at": now, "driver": f"570.{i}", "gpus": gpus}


def _machine(kind: str, **more: Any) -> Callable[[int, float], Event]:
    """Return events of a kind; "#" in a text becomes letters that differ from event to event."""

    def make(i: int, now: float) -> Event:
        fields = {
            name: value.replace("#", _letters(i)) if isinstance(value, str) else value for name, value in more.items()
        }
        seq = {"seq": i, "last_seq": i} if kind in {"xid", "sxid"} else {}
        gpu = {"gpu": _uuid("00", i % 64)} if kind.startswith("gpu.") else {}
        return {"kind": kind, "at": now - 60 + i / 100, **seq, **gpu, **fields}

    return make


def _letters(i: int) -> str:
    """Return a word without digits for a number: texts that differ in numbers alone are the same event."""
    return "".join(chr(97 + int(digit)) for digit in str(i))


def _by_turns(first: str, second: str) -> Callable[[int, float], Event]:
    makes = (_machine(first), _machine(second))
    return lambda i, now: makes[i % 2](i, now)


_MACHINE_EVENTS: dict[str, Callable[[int, float], Event]] = {
    "facts": _facts,
    "gpu.counters": _machine("gpu.counters", ecc=5),
    "xid, equal": _machine("xid", xid=63, text="row remap"),
    "xid, different": _machine("xid", xid=63, text="row remap #"),
    "sxid, different": _machine("sxid", sxid=12, text="link #"),
    "gpu.lost and back": _by_turns("gpu.lost", "gpu.back"),
    "gpu.silent and answers": _by_turns("gpu.silent", "gpu.answers"),
    "mount.slow": _machine("mount.slow", mount="/data/#"),
    "mount.well": _machine("mount.well", mount="/data/#"),
    "driver.reloaded": _machine("driver.reloaded", driver="#"),
    "kmsg.overrun": _machine("kmsg.overrun", from_seq=1, to_seq=2, text="#"),
    "agent.gap": _machine("agent.gap", text="#"),
    "boot": _machine("boot", text="#"),
    "unknown, 30 kB each": _machine("site.custom", text="#", values=["x" * 500] * 60),
}  # fmt: skip


def _samples(at: int, group: str) -> dict[str, Any]:
    from nodes.telemetry.fields import GPU_FIELDS

    n, gpus = 20, [_uuid(group, slot) for slot in range(64)]
    rng = np.random.default_rng(at)
    columns = {name: rng.integers(0, 4, (64, n)).tolist() for name in GPU_FIELDS}
    return {"at": at, "n": n, "gpus": gpus, "columns": columns}


def _host(at: int) -> dict[str, Any]:
    return {"at": at, "n": 0, "host": {f"ib_rx_mib:port-{i}": i + at / 7 for i in range(200)}}


def _processes(at: int) -> dict[str, Any]:
    gpus = [_uuid("00", slot) for slot in range(64)]
    all_of_them = [{"gpu": gpus[i % 64], "pid": i, "user": "ada", "name": "python " * 18} for i in range(500)]
    return {"at": at, "n": 0, "gpus": gpus, "host": {"load_1": 1.0}, "processes": all_of_them}


def _checkpoint(i: int, now: float) -> Event:
    return {"step": 1_000_000 + i, "generation": 1, "seconds": 3.0, "bytes": 10**9, "parent_step": i}


def _same_step(i: int, now: float) -> Event:
    return {"step": 5, "generation": 100_000 - i, "seconds": 3.0}


def _existing(i: int, now: float) -> Event:
    return {"step": i, "generation": 1, "reason": "a shard is missing"}


def _round_table(i: int, now: float) -> Event:
    rounds = {name: np.zeros(ROUNDS) for name in ROUND_COLUMNS} | {"round": np.arange(ROUNDS) + ROUNDS * i % 900_000}
    clients: dict[str, Any] = {name: np.zeros(NAMED) for name in CLIENT_COLUMNS}
    clients |= {"client": (np.arange(NAMED) + NAMED * i) % 100_000, "round": np.full(NAMED, rounds["round"][0])}
    return RoundTable(rounds, clients).pack()


def _split(i: int, now: float) -> Event:
    return SplitTable((i * 6_000) % 90_000, ("samples",), np.full((6_000, 1), i, np.uint32)).pack()


def _names(i: int, now: float) -> Event:
    return ClientNames((i * 6_000) % 90_000, tuple("ab" for _ in range(6_000))).pack()


_JOB_EVENTS: dict[str, Callable[[int, float], Event]] = {
    "progress": lambda i, now: {"step": i},
    "phase": lambda i, now: {"phase": "step"},
    "run.started": lambda i, now: {"start_step": 0, "steps": 10, "resumed_from": f"step-{i}.g7"},
    "incarnation.started": lambda i, now: {"incarnation": i, "resumed_from": f"step-{i}.g7"},
    "incarnation.ended": lambda i, now: {"incarnation": i, "restarting": True, "why": "exception"},
    "checkpoint.committed": _checkpoint,
    "checkpoint.committed, one step": _same_step,
    "checkpoint.pruned": _existing,
    "checkpoint.pruned, unknown": lambda i, now: {"step": 5_000_000 + i, "generation": 1},
    "checkpoint.damaged": _existing,
    "round.clients": _round_table,
    "clients.split": _split,
    "clients.named": _names,
    "custom": lambda i, now: {"text": "x" * 100},
    "custom, 60 kB each": lambda i, now: {"values": ["x" * 590] * 100},
}  # fmt: skip


def telemetry_post(stream: str, first: int, batches: Sequence[Event], now: float) -> dict[str, Any]:
    return {
        "version": 1, "stream": stream, "first": first, "boot_id": "b", "sent_at": now, "agent": "bench",
        "batches": list(batches),
    }  # fmt: skip


def report_post(events: Sequence[Event], series: Mapping[str, Any], *, events_a_batch: int) -> dict[str, Any]:
    """Return a post of one stream of rank 0, so many events a batch."""
    batches = max(1, -(-len(events) // events_a_batch))
    columns = {
        name: {"runs": [[0, 0, len(step)]], "step": step, "value": value} for name, (step, value) in series.items()
    }
    reported = [{"stream": 0, "batch": i // events_a_batch, **event} for i, event in enumerate(events)]
    return {"version": 1, "streams": [_stream(0, batches)], "series": columns, "events": reported}


def streams_post(count: int, now: float) -> dict[str, Any]:
    """Return a post of so many new streams, with an event each as far as a post may hold them."""
    events = [{"stream": i, "batch": 0, "kind": "custom", "time": now, "text": "x"} for i in range(min(count, 2_000))]
    return {"version": 1, "streams": [_stream(rank, 1) for rank in range(count)], "series": {}, "events": events}


def _stream(rank: int, batches: int) -> dict[str, Any]:
    return {
        "id": "", "incarnation": 0, "rank": rank, "node": "dgx-01", "boot_id": "b", "restart_count": 0, "first": 0,
        "times": [time.time()] * batches, "end": False,
    }  # fmt: skip
