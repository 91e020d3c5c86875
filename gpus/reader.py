"""Reads this node's GPUs as a child tells of them (gpus.nvml), and never waits for it.

A call into NVIDIA's driver may hang, unkillably. So nobody here makes one, or waits for who makes it: a child that has
said nothing for too long is told as Silent, killed, never joined, and replaced; while two that were killed are still
there, nothing more is started.

    reader = Reader(every=1.0, everything=True)
    while True:
        for told in reader.tend():  # gpus.told: Machine, Looks, Counters, DriverEvent, Lost, Back, Silent, Answers
            ...
        selectors or time.sleep  # reader.fileno(), where there is one, becomes readable with the next line
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import IO

from gpus.told import Absent, Answers, Back, Gpu, Lines, Looks, Lost, Machine, Silent, Told

OPENING_SECONDS = 60.0  # without persistence mode a driver sets up every GPU when it is opened
SILENT_SECONDS = 15.0  # besides the time between two looks
RETRY_SECONDS = (5.0, 600.0)  # first and longest wait before the next child
MOST_STUCK = 1  # a killed child that does not end; one more may be tried beside it
MOST_BYTES = 1 << 20  # of one line, and of what is taken in at once


class Reader:
    """`tend` often, always from one thread: the child ends with the thread that has started it."""

    def __init__(
        self,
        names: Sequence[str] | None = None,
        *,
        every: float,
        everything: bool = False,
        opening_seconds: float = OPENING_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
        retry_seconds: tuple[float, float] = RETRY_SECONDS,
    ) -> None:
        """`names`: as in CUDA_VISIBLE_DEVICES; None: all that there are; empty: there is nothing to read.

        `every`: seconds between two looks. `everything`: static facts, counters, processes and events, too.
        """
        self._names, self._every, self._everything = names, max(every, 0.1), everything
        self._opening, self._silent = opening_seconds, silent_seconds + every
        self._retry, (self._wait, self._longest) = retry_seconds[0], retry_seconds
        self._child: _Child | None = None
        self._stuck: list[_Child] = []
        self._next_start = 0.0
        self._lines = Lines()
        self._lost: set[int] = set()
        self.newest: Looks | None = None
        """The last looks; None while there are none, or NVML is silent. How old they are, `at` says."""
        self.silent_since: float | None = None
        """Unix time; None: it answers, or has only just been asked."""
        self.absent: Absent | None = None
        """Why there is nothing to read, as long as that is so."""

    @property
    def machine(self) -> Machine | None:
        """What was told last, also while NVML is silent."""
        return self._lines.machine

    @property
    def pids(self) -> list[int]:
        """Children that have not ended."""
        return [child.pid for child in self._children() if not child.has_ended]

    def fileno(self) -> int | None:
        """What becomes readable with the next line; another one after each new child."""
        return self._child.fileno if self._child else None

    def tend(self) -> list[Told]:
        """What has been told since the last time; notices silence, starts a child where there is none."""
        self._stuck = [child for child in self._stuck if not child.has_ended]
        if self._child is None:
            self._start()
            return []
        child, heard = self._child, []
        # Whether it has ended is asked first: what it said before that is all there to be read.
        has_ended = child.has_ended
        for line in child.read():
            heard += self._hear(line)
        if has_ended:
            child.end()
            self._child = None
            self._put_off()
        elif child.silence > (self._silent if child.has_spoken else self._opening):
            heard += self._give_up(child)
        return heard

    def close(self) -> None:
        """Whoever still reads is killed, and not waited for."""
        for child in self._children():
            child.end()

    def _children(self) -> list[_Child]:
        return [*self._stuck, *([self._child] if self._child else [])]

    def _start(self) -> None:
        idle = (self.absent and not self.absent.may_change) or (self._names is not None and not self._names)
        if idle or len(self._stuck) > MOST_STUCK or time.monotonic() < self._next_start:
            return
        try:
            self._child = _Child(command(self._every, self._names, everything=self._everything))
        except OSError:  # no memory, no process left
            self._put_off()

    def _put_off(self) -> None:
        self._next_start = time.monotonic() + self._wait
        self._wait = min(2 * self._wait, self._longest)

    def _give_up(self, child: _Child) -> list[Told]:
        child.end()
        self._stuck.append(child)
        self._child = self.newest = None
        self._put_off()
        if self.silent_since is not None:
            return []
        self.silent_since = time.time() - child.silence
        return [Silent(self.silent_since)]

    def _hear(self, line: bytes) -> list[Told]:
        before, told = self.machine, self._lines.read(line)
        match told:
            case None:
                return []
            case Absent():
                is_new = self.absent != told
                self.absent, self.newest = told, None
                return [told] if is_new else []
            case Machine():
                self.absent = None
                self._lost &= _same(before, told)
            case Looks():
                self.newest, self._wait = told, self._retry
                return [*self._answers(), told, *self._changes(told)]
        return [told]

    def _answers(self) -> list[Told]:
        if self.silent_since is None:
            return []
        since, self.silent_since = self.silent_since, None
        return [Answers(since, round(time.time() - since, 1))]

    def _changes(self, told: Looks) -> list[Told]:
        """GPUs that are lost since the last look, and those that are back."""
        lost = {place for place, look in enumerate(told.looks) if look is None}
        before, self._lost = self._lost, lost
        here = range(len(told.looks))
        gone: list[Told] = [Lost(told.at, told.time, place, self._gpu(place)) for place in sorted(lost - before)]
        return gone + [Back(told.at, told.time, place, self._gpu(place)) for place in here if place in before - lost]

    def _gpu(self, place: int) -> Gpu:
        gpus = self.machine.gpus if self.machine else ()
        return gpus[place] if place < len(gpus) else Gpu(str(place))


def command(seconds: float, names: Sequence[str] | None, *, everything: bool = False) -> list[str]:
    """What to start for a look every so many seconds; 0: it ends after its first line."""
    return [
        *(sys.executable, "-P", "-m", "gpus.nvml", f"{seconds:g}"),
        *(["--all"] if everything else []),
        *(names or []),
    ]


def environment() -> dict[str, str]:
    """Ours; where this very code lies in one archive (the agent's), the child finds it there, too."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if os.path.isdir(root):
        return dict(os.environ)
    theirs = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, theirs] if theirs else [root])}


def _same(before: Machine | None, now: Machine) -> set[int]:
    """Places with the GPU that they had, as far as anybody knows."""
    pairs = zip(before.gpus if before else (), now.gpus, strict=False)
    return {place for place, (old, new) in enumerate(pairs) if old.uuid in ("", new.uuid)}


class _Child:
    """The process, and what it says; it dies with us, unless the driver holds it."""

    def __init__(self, arguments: list[str]) -> None:
        self._process = subprocess.Popen(
            arguments,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(),
            process_group=0,
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
    def fileno(self) -> int:
        return self._output.fileno()

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    @property
    def silence(self) -> float:
        return time.monotonic() - self._heard_at

    def read(self) -> list[bytes]:
        """Whole lines that have come since the last time."""
        with suppress(BlockingIOError):
            while len(self._rest) < MOST_BYTES and (piece := os.read(self._output.fileno(), 65_536)):
                self._rest += piece
        *lines, self._rest = self._rest.split(b"\n")
        if len(self._rest) >= MOST_BYTES:
            self._rest = b""  # no line of the child's is that long
        if lines:
            self._heard_at, self.has_spoken = time.monotonic(), True
        return lines

    def end(self) -> None:
        """Killed if it still runs, and not waited for."""
        if not self.has_ended:
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
        self._output.close()
