"""Serve `/ws/cluster`: what machines do, as their agents report it; with `?node=NAME` all samples of that one.

Apart from these there are `hello` once it has joined (read now: whatever is newer will come), `heartbeat` every 10 s,
and `missed` if this reader was too slow and must read again. All are JSON; `{"kind": "machines", "machines": [line]}`
comes once a second at most, with the newest line of each machine that has reported (nodes.telemetry.live: its `gpus`
are by NVML's index, null where nothing is reported or the person may not see it), and `{"kind": "samples", …}` of one
machine as it comes, with `{"kind": "happened", "happened": [kind]}` of its events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

import msgspec
from channels.db import database_sync_to_async
from django.conf import settings

from jobs.listing import telemetry_access
from jobs.sockets.consumers import LISTS_S, NOT_FOUND, NOT_SIGNED_IN, RECHECK_S, Socket
from nodes.models import Agent, Gpu
from nodes.telemetry import live
from portal.http import sockets
from portal.models import User

MAX_GPUS = 64  # of a machine
HIDDEN_S = 5.0  # how long a person may still see a GPU that was just allocated to a job hidden from them


@dataclass
class _GpuIndexes:
    """The index of each GPU on its machine, by UUID: shared by all sockets of a process."""

    index: dict[str, int] = field(default_factory=dict)
    read_at: float = -RECHECK_S

    async def refresh(self, uuids: Iterable[str], *, after_s: float = LISTS_S) -> None:
        """Read the indexes again if one is unknown, at most once every `after_s` seconds."""
        now = time.monotonic()
        if now - self.read_at > after_s and not all(uuid in self.index for uuid in uuids):
            self.read_at = now
            self.index = await self._read()

    @database_sync_to_async
    def _read(self) -> dict[str, int]:
        rows = Gpu.objects.filter(gone_at=None, index__lt=MAX_GPUS).order_by().values_list("uuid", "index")
        return dict(rows)


_gpu_indexes = _GpuIndexes()


class ClusterSocket(Socket):
    """The socket of all machines, or of one."""

    async def begin(self, user: User) -> bool:
        self.lines: dict[str, dict[str, Any]] = {}
        self.hidden: set[str] = set()  # GPUs, by UUID, that are none of this person's business just now
        self.node = parse_qs(self.scope["query_string"].decode("latin-1")).get("node", [""])[0]
        agent_id = await self._agent_id()
        if self.node and agent_id is None:
            return False
        self.hidden = await self._hidden() or set()
        if agent_id is not None:
            await self.join(live.topic(agent_id), self._pass_on)
        else:
            await self.join(live.TOPIC, self._collect)
        await self.send_json(kind="hello")
        self.start(self._beat(), self._recheck(), *([] if self.node else [self._send_lines()]))
        return True

    async def _pass_on(self, message: bytes | None) -> None:
        """Pass on one machine's samples."""
        if message is None:
            await self.send_json(kind="missed")
            return
        sample = msgspec.json.decode(message)
        if "happened" in sample:
            await self.send_json(kind="happened", **sample)
            return
        for row, uuid in enumerate(sample["gpus"]):
            if uuid in self.hidden:
                for column in sample["columns"].values():
                    column[row] = [None] * len(column[row])
        await self.send_json(kind="samples", **sample)

    async def _collect(self, message: bytes | None) -> None:
        if message is None:
            await self.send_json(kind="missed")
            return
        line = msgspec.json.decode(message)
        uuids = line.pop("uuids")
        await _gpu_indexes.refresh(uuids)
        values = dict(zip(uuids, line["gpus"], strict=False))
        line["gpus"] = _by_index({uuid: value for uuid, value in values.items() if uuid not in self.hidden})
        self.lines[line["node"]] = line

    async def _send_lines(self) -> None:
        while True:
            await asyncio.sleep(LISTS_S)
            if self.lines:
                lines, self.lines = self.lines, {}
                await self.send_json(kind="machines", machines=list(lines.values()))

    async def _recheck(self) -> None:
        while True:
            await asyncio.sleep(RECHECK_S if settings.VIGIL_QUEUE_VISIBLE == "everyone" else HIDDEN_S)
            hidden = await self._hidden()
            if hidden is None:
                await self.close(NOT_SIGNED_IN if not self.node else NOT_FOUND)
                return
            self.hidden = hidden
            await _gpu_indexes.refresh([""], after_s=RECHECK_S)

    @database_sync_to_async
    def _agent_id(self) -> int | None:
        return Agent.objects.filter(node=self.node).values_list("pk", flat=True).first() if self.node else None

    @database_sync_to_async
    def _hidden(self) -> set[str] | None:
        """Return the GPUs that are hidden from this person now; None if nobody is signed in any more."""
        user = sockets.current_user(self.scope)
        if not isinstance(user, User):
            return None
        return telemetry_access.hidden_now(user)


def _by_index(values: dict[str, Any]) -> list[Any]:
    placed = {_gpu_indexes.index[uuid]: value for uuid, value in values.items() if uuid in _gpu_indexes.index}
    return [placed.get(index) for index in range(max(placed, default=-1) + 1)]
