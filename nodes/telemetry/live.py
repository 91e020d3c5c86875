"""What sockets hear of machines, after the commit: a short line each for maps, all samples for who looks at one.

On `TOPIC` a message is JSON: {"node", "at", "uuids", "gpus": [[gpu_percent, memory_mib, temperature_c, watts] …],
"cpu"}. On a machine's own topic it is {"node", "at", "period", "gpus": [uuid], "columns": {field: [[…]]}, "host": {…}},
null is not told; or {"node", "happened": [kind]}: whoever looks reads what it was, as far as they may see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from django.db import transaction

from nodes.models import Agent
from nodes.telemetry.fields import PLACE
from nodes.telemetry.wire import MISSING, Batch
from portal.publish import publish

TOPIC = "vigil:cluster"
FRESH_S = 90.0  # older samples are history: who looks reads them
SHOWN = ("gpu_percent", "memory_mib", "temperature_c", "watts")


def topic(agent_id: int) -> str:
    return f"vigil:node:{agent_id}"


def after_commit(agent: Agent, batches: Sequence[Batch], now: float) -> None:
    """Tell the newest of these batches, unless it is old."""
    newest = max(batches, key=lambda batch: batch.at)
    if newest.at + newest.period * newest.n < now - FRESH_S:
        return
    messages = {TOPIC: msgspec.json.encode(line(agent.node, newest)), topic(agent.pk): _whole(agent.node, newest)}
    transaction.on_commit(lambda: publish(messages))


def happened(agent: Agent, kinds: Sequence[str]) -> None:
    """Tell whoever looks at this machine that something happened to it, after the commit."""
    message = msgspec.json.encode({"node": agent.node, "happened": list(kinds)})
    messages = {topic(agent.pk): message}
    transaction.on_commit(lambda: publish(messages))


def line(node: str, batch: Batch) -> dict[str, Any]:
    """A machine as maps follow it: its last second."""
    gpus = []
    if batch.n:
        places = [PLACE[name] for name in SHOWN]
        gpus = [_told(batch.values[places, row, -1].tolist()) for row in range(len(batch.gpus))]
    cpu = batch.host.get("cpu_percent")
    told = None if cpu is None or cpu != cpu else cpu
    return {"node": node, "at": batch.at, "uuids": batch.gpus, "gpus": gpus, "cpu": told}


def _whole(node: str, batch: Batch) -> bytes:
    columns = {}
    for name, place in PLACE.items():
        rows = batch.values[place].tolist()
        if any(value != MISSING for row in rows for value in row):
            columns[name] = [_told(row) for row in rows]
    host = {name: None if value != value else value for name, value in batch.host.items()}
    about = {"node": node, "at": batch.at, "period": batch.period, "gpus": batch.gpus}
    return msgspec.json.encode({**about, "columns": columns, "host": host})


def _told(values: list[int]) -> list[int | None]:
    return [None if value == MISSING else value for value in values]
