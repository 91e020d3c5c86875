"""A rank's heartbeat: written by the training loop, never by a thread, so that a stuck loop shows (protocols.md §6).

heartbeat = Heartbeat.open(attempt_dir, rank=rank, incarnation=incarnation)
heartbeat.beat("init")                 # before the process group is made: 20 s limit once every rank is in it
heartbeat.beat("restore"); heartbeat.beat("compile")
heartbeat.beat("step", step)           # at the start of every step; a few µs
heartbeat.beat("exchange", step)       # after a step, for replicas that synchronise only now and then
heartbeat.beat("validate", step) …     # whenever the phase changes, and back to "step" after it
"""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

RECORD_BYTES = 128


@dataclass(frozen=True)
class Beat:
    incarnation: int
    phase: str
    step: int
    begun: int  # number of steps that this incarnation has begun
    monotonic: float  # of the rank's node: comparable only with itself


class Heartbeat:
    """A single fixed-size record, overwritten in place."""

    def __init__(self, file: int, incarnation: int) -> None:
        self._file, self._incarnation = file, incarnation
        self._begun, self._step = 0, -1
        self.phase = ""

    @classmethod
    def open(cls, attempt_dir: Path, *, rank: int, incarnation: int) -> Heartbeat:
        path = heartbeat_path(attempt_dir, rank=rank, incarnation=incarnation)
        path.parent.mkdir(parents=True, exist_ok=True)
        return cls(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o640), incarnation)

    def beat(self, phase: str, step: int = 0) -> None:
        """Record where the loop is. Errors are ignored: a full disk must not stop training."""
        self.phase = phase
        if phase == "step" and step != self._step:
            self._begun, self._step = self._begun + 1, step
        record = (
            f'{{"incarnation":{self._incarnation},"phase":"{phase}","step":{step},"begun":{self._begun},'
            f'"monotonic":{time.monotonic():.6f}}}'
        )
        with suppress(OSError):
            os.pwrite(self._file, record.ljust(RECORD_BYTES - 1).encode() + b"\n", 0)


class NullHeartbeat:
    """The heartbeat outside an attempt, where nobody reads it."""

    phase = ""

    def beat(self, phase: str, step: int = 0) -> None:
        self.phase = phase


def heartbeat_path(attempt_dir: Path, *, rank: int, incarnation: int) -> Path:
    return attempt_dir / "heartbeat" / f"{incarnation}.{rank}"


def read_beat(path: Path) -> Beat | None:
    """Return the last record, or None if there is none yet (or only half of one: the next read gets it)."""
    try:
        with open(path, "rb") as file:
            record = json.loads(file.read(RECORD_BYTES * 2))
        values = (int(record["step"]), int(record["begun"]), float(record["monotonic"]))
        return Beat(int(record["incarnation"]), str(record["phase"])[:32], *values)
    except (OSError, ValueError, KeyError, TypeError):
        return None
