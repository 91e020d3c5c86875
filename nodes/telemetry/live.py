"""Publish machines' values to sockets after the commit: a short line each for maps, all samples for node pages.

On `TOPIC` a message is JSON: {"node", "at", "uuids", "gpus": [[gpu_percent, memory_mib, temperature_c, watts] …],
"cpu"}. On a machine's own topic it is {"node", "at", "period", "gpus": [uuid], "columns": {field: [[…]]}, "host": {…}},
with null for missing values; or {"node", "happened": [kind]}: clients then read the events that they may see.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from django.db import transaction

from nodes.models import Agent
from nodes.telemetry.fields import PLACE
from nodes.telemetry.wire import MISSING, SampleBatch
from portal.publish import publish

TOPIC = "vigil:cluster"
FRESH_S = 90.0  # older samples are history, which pages read themselves
SHOWN = ("gpu_percent", "memory_mib", "temperature_c", "watts")


def topic(agent_id: int) -> str:
    return f"vigil:node:{agent_id}"


def after_commit(agent: Agent, batches: Sequence[SampleBatch], now: float) -> None:
    """Publish the newest of these batches, unless it is old."""
    newest = max(batches, key=lambda batch: batch.at)
    if newest.at + newest.period * newest.n < now - FRESH_S:
        return
    messages = {TOPIC: msgspec.json.encode(line(agent.node, newest)), topic(agent.pk): _all_samples(agent.node, newest)}
    transaction.on_commit(lambda: publish(messages))


def publish_events(agent: Agent, kinds: Sequence[str]) -> None:
    """Publish after the commit that these kinds of events happened on the machine."""
    message = msgspec.json.encode({"node": agent.node, "happened": list(kinds)})
    messages = {topic(agent.pk): message}
    transaction.on_commit(lambda: publish(messages))


def line(node: str, batch: SampleBatch) -> dict[str, Any]:
    """Return a machine's last second, for maps."""
    gpus = []
    if batch.n:
        places = [PLACE[name] for name in SHOWN]
        gpus = [_with_nulls(batch.values[places, row, -1].tolist()) for row in range(len(batch.gpus))]
    cpu = batch.host.get("cpu_percent")
    cpu_percent = None if cpu is None or cpu != cpu else cpu
    return {"node": node, "at": batch.at, "uuids": batch.gpus, "gpus": gpus, "cpu": cpu_percent}


def _all_samples(node: str, batch: SampleBatch) -> bytes:
    columns = {}
    for name, place in PLACE.items():
        rows = batch.values[place].tolist()
        if any(value != MISSING for row in rows for value in row):
            columns[name] = [_with_nulls(row) for row in rows]
    host = {name: None if value != value else value for name, value in batch.host.items()}
    about = {"node": node, "at": batch.at, "period": batch.period, "gpus": batch.gpus}
    return msgspec.json.encode({**about, "columns": columns, "host": host})


def _with_nulls(values: list[int]) -> list[int | None]:
    return [None if value == MISSING else value for value in values]
