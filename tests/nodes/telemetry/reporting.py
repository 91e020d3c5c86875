"""A simulated agent that follows docs/reference/protocols.md §11, for tests of the portal."""

from __future__ import annotations

import gzip
import json
import time
from dataclasses import dataclass, field
from typing import Any

from django.test import Client

from nodes.models import Agent
from nodes.telemetry.enrolment import enroll_here

UUIDS = tuple(f"GPU-{i:08x}-0000-0000-0000-000000000000" for i in range(8))
START = 1_763_000_000  # a Unix second


@dataclass
class Machine:
    """The agent of a machine: it numbers batches and posts those that a test gives it."""

    node: str = "dgx-01"
    gpus: tuple[str, ...] = UUIDS[:2]
    stream: str = "0123456789abcdef"
    boot_id: str = "b1"
    next: int = 0
    token: str = ""
    pending: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token = self.token or enroll_here(self.node)

    @property
    def agent(self) -> Agent:
        return Agent.objects.get(node=self.node)

    def batch(self, at: int, *, n: int = 10, host: dict[str, Any] | None = None, **columns: Any) -> dict[str, Any]:
        """Return ten seconds of samples: for each column one number (the same for all GPUs) or a list of rows."""
        rows = {
            name: value if isinstance(value, list) else [[value] * n for _ in self.gpus]
            for name, value in columns.items()
        }
        return {"at": at, "period": 1, "n": n, "gpus": list(self.gpus), "columns": rows, "host": host or {}}

    def event(self, kind: str, at: float, **more: Any) -> dict[str, Any]:
        """Return a batch with only this event."""
        return {"at": int(at), "n": 0, "events": [{"kind": kind, "at": at, **more}]}

    def facts(self, at: float, **more: Any) -> dict[str, Any]:
        same = {"name": "NVIDIA H100", "memory_mib": 81_559}
        gpus = [
            {"uuid": uuid, "index": i, "minor": i, "bus": f"00000000:{i + 5:02x}:00.0", **same}
            for i, uuid in enumerate(self.gpus)
        ]
        return self.event("facts", at, **{"driver": "570.195.03", "gpus": gpus, **more})

    def post(self, *batches: dict[str, Any], first: int | None = None, **frame: Any) -> Any:
        """Post these batches at the end of the stream, or at `first`, and return the response."""
        body = {
            "version": 1,
            "stream": self.stream,
            "first": self.next if first is None else first,
            "boot_id": self.boot_id,
            "sent_at": time.time(),
            "agent": "1.0",
            "batches": list(batches),
            **frame,
        }
        return self.send(json.dumps(body).encode())

    def send(self, body: bytes, *, node: str = "", token: str | None = None) -> Any:
        answer = Client().post(
            f"/api/v1/nodes/{node or self.node}/telemetry",
            gzip.compress(body),
            content_type="application/json",
            headers={
                "Authorization": f"Bearer {self.token if token is None else token}",
                "Content-Encoding": "gzip",
            },
        )
        if answer.status_code == 200 and not node:
            self.next = answer.json()["next"]
        return answer

    def fill(self, start: int, end: int, **columns: Any) -> None:
        """Post batches of 10 s from `start` until `end`, 60 per post."""
        batches = [self.batch(at, **columns) for at in range(start, end, 10)]
        for at in range(0, len(batches), 60):
            assert self.post(*batches[at : at + 60]).status_code == 200
