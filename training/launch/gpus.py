"""The job's GPUs on this node, as a process beside the ranks tells of them (training.launch.nvml).

A call into NVIDIA's driver may hang, unkillably. So nobody here makes one, or waits for who makes it: a reader that
has said nothing for too long is told as an event with the time since when, killed, never joined, and replaced; while
two that were killed are still there, nothing more is started.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import IO, Any

from training.launch.ranks import child_setup
from training.launch.stop import STOP_SIGNALS

OPENING_SECONDS = 60.0  # without persistence mode a driver sets up every GPU when it is opened
SILENT_SECONDS = 15.0  # besides the time between two looks
RETRY_SECONDS = (5.0, 600.0)  # first and longest wait before the next reader
MOST_STUCK = 1  # a killed reader that does not end; one more may be tried beside it
MOST_BYTES = 1 << 20
MOST_GPUS = 64

Tell = Callable[..., None]
"""An event of the launcher's: its kind, and what it says."""


def named(count: int, visible: str) -> list[str]:
    """So many GPUs, as CUDA_VISIBLE_DEVICES names them or by their numbers."""
    return ([part.strip() for part in visible.split(",") if part.strip()] or [str(i) for i in range(count)])[:MOST_GPUS]


def arguments(seconds: float, names: list[str]) -> list[str]:
    return [sys.executable, "-P", "-m", "training.launch.nvml", str(seconds), *names]


class Gpus:
    """`tend` often, `look` when a sample is due; neither waits."""

    def __init__(
        self,
        names: list[str],
        *,
        every: float,
        tell: Tell,
        opening_seconds: float = OPENING_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
        retry_seconds: tuple[float, float] = RETRY_SECONDS,
    ) -> None:
        """`names`: as in CUDA_VISIBLE_DEVICES; none: there is nothing to read. `every`: seconds between two looks."""
        self._names, self._every, self._tell = names, max(every, 0.1), tell
        self._opening, self._silent = opening_seconds, silent_seconds + every
        self._reader: _Reader | None = None
        self._stuck: list[_Reader] = []
        self._retry, (self._wait, self._longest) = retry_seconds[0], retry_seconds
        self._next_start = 0.0
        self._silent_since: float | None = None  # by the wall clock; None: it answers
        self._about: list[dict[str, Any]] = []
        self._lost: set[int] = set()
        self._newest: tuple[float, list[dict[str, Any]]] = (0.0, [])

    @property
    def pids(self) -> list[int]:
        """Readers that have not ended."""
        readers = [*self._stuck, *([self._reader] if self._reader else [])]
        return [reader.pid for reader in readers if not reader.has_ended]

    def tend(self) -> None:
        """Take in what was told, notice silence, start a reader where there is none."""
        self._stuck = [reader for reader in self._stuck if not reader.has_ended]
        if self._reader is None:
            self._start()
            return
        for line in self._reader.read():
            self._hear(line)
        if self._reader.has_ended:
            self._reader.end()
            self._reader = None
            self._put_off()
        elif self._reader.silence > (self._silent if self._reader.has_spoken else self._opening):
            self._give_up(self._reader)

    def look(self) -> dict[str, float]:
        """Mean use of the job's GPUs, their memory and power together; nothing where that is not known just now.

        A lost GPU stays in the mean: it does nothing. What none of them tells is left out.
        """
        at, looks = self._newest
        if time.monotonic() - at > 2 * self._every + 1.0:
            return {}
        percent = [0.0 if look.get("lost") else look["percent"] for look in looks if look.keys() & {"lost", "percent"}]
        told = {"gpu_percent": sum(percent) / len(percent)} if percent else {}
        for name in ("memory_gib", "watts"):
            if found := [look[name] for look in looks if name in look]:
                told[f"gpu_{name}"] = sum(found)
        return told

    def close(self) -> None:
        """Whoever still reads is killed, and not waited for."""
        for reader in [*self._stuck, *([self._reader] if self._reader else [])]:
            reader.end()

    def _start(self) -> None:
        if not self._names or len(self._stuck) > MOST_STUCK or time.monotonic() < self._next_start:
            return
        try:
            self._reader = _Reader(arguments(self._every, self._names))
        except OSError:  # no memory, no process left
            self._put_off()

    def _put_off(self) -> None:
        self._next_start = time.monotonic() + self._wait
        self._wait = min(2 * self._wait, self._longest)

    def _give_up(self, reader: _Reader) -> None:
        reader.end()
        self._stuck.append(reader)
        self._reader, self._newest = None, (0.0, [])
        self._put_off()
        if self._silent_since is None:
            self._silent_since = time.time() - reader.silence
            self._tell("gpu.silent", since=self._silent_since, gpus=self._names)

    def _hear(self, line: dict[str, Any]) -> None:
        if "none" in line:  # no NVIDIA here
            self._names = []
        elif "gpus" in line:
            self._about = self._about or line["gpus"]
        elif "looks" in line:
            self._newest = (line["at"], line["looks"])
            self._wait = self._retry
            if self._silent_since is not None:
                seconds = time.time() - self._silent_since
                self._tell("gpu.answers", since=self._silent_since, seconds=round(seconds, 1))
                self._silent_since = None
            self._note_lost({place for place, look in enumerate(line["looks"]) if look.get("lost")})

    def _note_lost(self, lost: set[int]) -> None:
        for place in sorted(lost - self._lost):
            known = self._about[place] if place < len(self._about) else {}
            names = {name: known[name] for name in ("name", "uuid", "bus") if name in known}
            self._tell("gpu.lost", gpu=self._names[place], of=len(self._names), local_rank=place, **names)
        self._lost = lost


class _Reader:
    """The process, and what it says; it dies with us, unless the driver holds it."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,
            preexec_fn=child_setup(STOP_SIGNALS),
        )
        assert self._process.stdout is not None
        self._output: IO[bytes] = self._process.stdout
        os.set_blocking(self._output.fileno(), False)
        self._rest = b""
        self._heard_at = time.monotonic()
        self.has_spoken = False

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def silence(self) -> float:
        return time.monotonic() - self._heard_at

    def read(self) -> list[dict[str, Any]]:
        """Whole lines that have come since the last time."""
        with suppress(BlockingIOError):
            while (piece := os.read(self._output.fileno(), 65_536)) and len(self._rest) < MOST_BYTES:
                self._rest += piece
        *lines, self._rest = self._rest.split(b"\n")
        if lines:
            self._heard_at, self.has_spoken = time.monotonic(), True
        return [found for line in lines if (found := _told(line))]

    def end(self) -> None:
        """Killed if it still runs, and not waited for."""
        if not self.has_ended:
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
        self._output.close()


def _told(line: bytes) -> dict[str, Any]:
    """What a line says; nothing if it is not the reader's, since a library may print whatever it likes."""
    with suppress(ValueError):
        found = json.loads(line)
        return found if isinstance(found, dict) else {}
    return {}
