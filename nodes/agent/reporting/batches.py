"""Build batches as they are stored and sent: samples of some periods, or events alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

EVENTS_PER_BATCH = 200
EVENT_BYTES = 31 * 1024
Event = dict[str, Any]
LATEST_ONLY = frozenset({"facts", "gpu.counters"})
"""Event kinds of which only the newest matters."""


def with_samples(
    *,
    at: float,
    period: float,
    n: int,
    samples: dict[str, Any],
    host: dict[str, float | None],
    processes: list[dict[str, Any]],
    events: list[Event],
) -> bytes:
    """Build a batch of `n` periods from `at` on. `posting` relies on the order of its parts."""
    head = {**_head(at, period, n), "gpus": samples["gpus"], "columns": samples["columns"]}
    return _packed({**head, "host": host, "processes": processes, "events": _bounded(events)})


def events_only(events: list[Event], *, at: float, period: float) -> bytes:
    return _packed({**_head(at, period, 0), "events": _bounded(events)})


def _head(at: float, period: float, n: int) -> dict[str, Any]:
    """Return the batch's head, with whole seconds as integers."""
    return {"at": int(at) if period >= 1 else round(at, 3), "period": int(period) if period >= 1 else period, "n": n}


def _packed(batch: dict[str, Any]) -> bytes:
    return json.dumps(batch, separators=(",", ":"), allow_nan=False).encode()


def _bounded(events: list[Event]) -> list[Event]:
    return [event for event in events if len(json.dumps(event)) <= EVENT_BYTES]


def in_chunks(events: list[Event]) -> Iterator[list[Event]]:
    for start in range(0, len(events), EVENTS_PER_BATCH):
        yield events[start : start + EVENTS_PER_BATCH]


def gap_in(batches: Iterable[dict[str, Any]], *, now: float, problem: str = "") -> list[Event]:
    """Return an event for the samples that are missing with these batches; empty if they have none."""
    sampled = [batch for batch in batches if batch.get("n")]
    if not sampled:
        return []
    gap = {
        "kind": "agent.gap",
        "at": round(now, 3),
        "from": min(batch["at"] for batch in sampled),
        "to": max(batch["at"] + batch["n"] * batch["period"] for batch in sampled),
        "batches": len(sampled),
    }
    return [gap | ({"problem": problem} if problem else {})]


def events_to_resend(events: Iterable[Event]) -> list[Event]:
    """Return the events of discarded batches that must be sent again: not superseded ones; gaps merge into one."""
    resent: list[Event] = []
    newest: dict[tuple[Any, Any], Event] = {}
    gap: Event | None = None
    for event in events:
        if event.get("kind") in LATEST_ONLY:
            newest[event["kind"], event.get("gpu")] = event
        elif event.get("kind") == "agent.gap" and "problem" not in event:
            gap = _merged_gap(gap, event) if gap else event
        else:
            resent.append(event)
    return [{**event, "again": True} for event in [*newest.values(), *resent, *([gap] if gap else [])]]


def _merged_gap(gap: Event, other: Event) -> Event:
    return {
        **gap,
        "from": min(gap["from"], other["from"]),
        "to": max(gap["to"], other["to"]),
        "batches": gap["batches"] + other["batches"],
    }
