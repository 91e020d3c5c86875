"""Simulate a node agent's posts, which the benches of telemetry send or insert."""

from __future__ import annotations

import gzip
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

GPUS, SAMPLES, PERIOD_S = 8, 10, 10
TOKEN = "vga_bench"


@dataclass
class Sender:
    """Simulates one agent: numbers its batches, whose values wander like a busy GPU's."""

    node: str
    number: int
    seq: int = 0
    _level: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.number)
        self.uuids = [f"GPU-{self.number:08x}-0000-0000-0000-{i:012x}" for i in range(GPUS)]
        # As nodes.telemetry.fields has them: percent, MiB, °C, watts, MHz, bits, MiB/s.
        self._level = [[95, 90, 71_000, 66, 74, 640, 1_755, 0, 9_000, 9_000, 1_200, 900] for _ in range(GPUS)]

    def batches(self, count: int, at: int | None = None) -> list[dict[str, Any]]:
        now = int(time.time()) - PERIOD_S if at is None else at
        return [self._batch(now + PERIOD_S * i) for i in range(count)]

    def next(self, count: int = 1, at: int | None = None) -> bytes:
        """Return the request with its next batches."""
        post = {
            "version": 1, "stream": f"{self.number:016x}", "first": self.seq, "boot_id": "b", "sent_at": time.time(),
            "agent": "bench", "batches": self.batches(count, at),
        }  # fmt: skip
        self.seq += count
        body = gzip.compress(json.dumps(post).encode(), 6)
        head = (
            f"POST /api/v1/nodes/{self.node}/telemetry HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {TOKEN}\r\n"
            f"Content-Type: application/json\r\nContent-Encoding: gzip\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def _batch(self, at: int) -> dict[str, Any]:
        from nodes.telemetry.fields import GPU_FIELDS

        columns = {}
        for place, name in enumerate(GPU_FIELDS):
            columns[name] = [[self._value(gpu, place) for _ in range(SAMPLES)] for gpu in range(GPUS)]
        return {
            "at": at, "period": 1, "n": SAMPLES, "gpus": self.uuids, "columns": columns,
            "host": {"cpu_percent": round(self._random.uniform(5, 60), 1), "load_1": 12.5, "memory_used_mib": 812_000},
        }  # fmt: skip

    def _value(self, gpu: int, place: int) -> int:
        level = self._level[gpu][place]
        if place == 7:  # reasons for throttling: mostly none
            return 4 if self._random.random() < 0.02 else 0
        step = max(1, level // 50)
        return max(0, level + self._random.randint(-step, step))
