"""Read this node's GPUs through a child process (gpus.nvml) without ever waiting for it.

A call into NVIDIA's driver may hang and be unkillable, so this process makes none and does not wait for the one that
does. A child that prints nothing for too long is reported as NvmlSilent, killed, never joined, and replaced; while two
killed children still exist, no more are started.

    reader = GpuReader(every=1.0, detailed=True)
    while True:
        for report in reader.poll():  # a gpus.reports.GpuReport
            ...
        selectors or time.sleep  # reader.fileno(), if any, becomes readable with the next line
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import IO

from gpus.reports import (
    GpuInfo,
    GpuInventory,
    GpuLost,
    GpuRecovered,
    GpuReport,
    GpuSamples,
    NvmlAbsent,
    NvmlReopening,
    NvmlResponding,
    NvmlSilent,
    ReportParser,
)

OPENING_SECONDS = 60.0  # without persistence mode the driver initialises every GPU when it is opened
SILENT_SECONDS = 15.0  # in addition to the time between two samples
RETRY_SECONDS = (5.0, 600.0)  # first and longest wait before the next child
MAX_STUCK = 1  # killed children that do not end; one more may be started next to these
MAX_BYTES = 1 << 20  # of one line, and of one read


class GpuReader:
    """Call `poll` often, always from the same thread: the child dies with the thread that started it."""

    def __init__(
        self,
        names: Sequence[str] | None = None,
        *,
        every: float,
        detailed: bool = False,
        opening_seconds: float = OPENING_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
        retry_seconds: tuple[float, float] = RETRY_SECONDS,
    ) -> None:
        """Set up a reader; the first `poll` starts the child.

        `names` are as in CUDA_VISIBLE_DEVICES; None: all GPUs; empty: nothing to read. `every`: seconds between two
        samples. `detailed`: also static facts, counters, processes and events.
        """
        self._names, self._every, self._detailed = names, max(every, 0.1), detailed
        self._opening, self._silent = opening_seconds, silent_seconds + every
        self._retry, (self._wait, self._longest) = retry_seconds[0], retry_seconds
        self._child: _Child | None = None
        self._stuck: list[_Child] = []
        self._next_start = 0.0
        self._parser = ReportParser()
        self._lost: set[int] = set()
        self._is_reopening = False  # until the next inventory, whichever child reads it
        self.newest: GpuSamples | None = None
        """The last samples; None if there are none yet, or NVML is silent. `at` gives their age."""
        self.silent_since: float | None = None
        """Unix time since NVML stopped responding; None while it responds or was just started."""
        self.absent: NvmlAbsent | None = None
        """Why there is nothing to read; None otherwise."""

    @property
    def inventory(self) -> GpuInventory | None:
        """Return the last reported inventory, also while NVML is silent."""
        return self._parser.inventory

    @property
    def pids(self) -> list[int]:
        """Return the pids of children that have not ended."""
        return [child.pid for child in self._children() if not child.has_ended]

    def fileno(self) -> int | None:
        """Return a descriptor that becomes readable with the next line; it changes with each new child."""
        return self._child.fileno if self._child else None

    def poll(self) -> list[GpuReport]:
        """Return the reports since the last call; detect silence, and start a child if there is none."""
        self._stuck = [child for child in self._stuck if not child.has_ended]
        if self._child is None:
            self._start()
            return []
        child, reports = self._child, []
        # Check for its end before reading: everything that it printed before ending is then readable.
        has_ended = child.has_ended
        for line in child.read():
            reports += self._process_line(line)
        if has_ended:
            child.kill()
            self._child = None
            self._delay_start()
        elif child.silence > (self._silent if child.has_printed and not self._is_reopening else self._opening):
            reports += self._abandon(child)
        return reports

    def close(self) -> None:
        """Kill the children without waiting for them."""
        for child in self._children():
            child.kill()

    def _children(self) -> list[_Child]:
        return [*self._stuck, *([self._child] if self._child else [])]

    def _start(self) -> None:
        idle = (self.absent and not self.absent.may_change) or (self._names is not None and not self._names)
        if idle or len(self._stuck) > MAX_STUCK or time.monotonic() < self._next_start:
            return
        try:
            self._child = _Child(command(self._every, self._names, detailed=self._detailed))
        except OSError:  # out of memory or processes
            self._delay_start()

    def _delay_start(self) -> None:
        self._next_start = time.monotonic() + self._wait
        self._wait = min(2 * self._wait, self._longest)

    def _abandon(self, child: _Child) -> list[GpuReport]:
        child.kill()
        self._stuck.append(child)
        self._child = self.newest = None
        self._delay_start()
        if self.silent_since is not None:
            return []
        self.silent_since = time.time() - child.silence
        return [NvmlSilent(self.silent_since)]

    def _process_line(self, line: bytes) -> list[GpuReport]:
        previous, report = self.inventory, self._parser.parse(line)
        match report:
            case None:
                return []
            case NvmlReopening():
                self._is_reopening = True
                return []
            case NvmlAbsent():
                is_new = self.absent != report
                self.absent, self.newest = report, None
                return [report] if is_new else []
            case GpuInventory():
                self.absent = None
                self._lost &= _unchanged_indices(previous, report)
                report = replace(report, reopened=report.reopened or self._is_reopening)
                self._is_reopening = False
            case GpuSamples():
                self.newest, self._wait = report, self._retry
                return [*self._end_silence(), report, *self._lost_and_recovered(report)]
        return [report]

    def _end_silence(self) -> list[GpuReport]:
        if self.silent_since is None:
            return []
        since, self.silent_since = self.silent_since, None
        return [NvmlResponding(since, round(time.time() - since, 1))]

    def _lost_and_recovered(self, samples: GpuSamples) -> list[GpuReport]:
        """Report GPUs lost since the last sample, and those that are back."""
        lost = {index for index, sample in enumerate(samples.samples) if sample is None}
        before, self._lost = self._lost, lost
        indices = range(len(samples.samples))
        reports: list[GpuReport] = [
            GpuLost(samples.at, samples.time, index, self._gpu(index)) for index in sorted(lost - before)
        ]
        return reports + [
            GpuRecovered(samples.at, samples.time, index, self._gpu(index))
            for index in indices
            if index in before - lost
        ]

    def _gpu(self, index: int) -> GpuInfo:
        gpus = self.inventory.gpus if self.inventory else ()
        return gpus[index] if index < len(gpus) else GpuInfo(str(index))


def command(seconds: float, names: Sequence[str] | None, *, detailed: bool = False) -> list[str]:
    """Return the command that samples at this interval in seconds; 0: exit after the first line."""
    return [
        *(sys.executable, "-P", "-m", "gpus.nvml", f"{seconds:g}"),
        *(["--all"] if detailed else []),
        *(names or []),
    ]


def environment() -> dict[str, str]:
    """Return our environment. If this code runs from the agent's archive, PYTHONPATH lets the child find it too."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if os.path.isdir(root):
        return dict(os.environ)
    existing = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, existing] if existing else [root])}


def _unchanged_indices(before: GpuInventory | None, now: GpuInventory) -> set[int]:
    """Return the indices that have the same GPU as before, as far as known."""
    pairs = zip(before.gpus if before else (), now.gpus, strict=False)
    return {index for index, (old, new) in enumerate(pairs) if old.uuid in ("", new.uuid)}


class _Child:
    """The child process and its output; it dies with us, unless the driver blocks it."""

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
        self._last_output_at = time.monotonic()
        self.has_printed = False

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
        return time.monotonic() - self._last_output_at

    def read(self) -> list[bytes]:
        """Return the complete lines since the last call."""
        with suppress(BlockingIOError):
            while len(self._rest) < MAX_BYTES and (piece := os.read(self._output.fileno(), 65_536)):
                self._rest += piece
        *lines, self._rest = self._rest.split(b"\n")
        if len(self._rest) >= MAX_BYTES:
            self._rest = b""  # the child prints no line that long
        if lines:
            self._last_output_at, self.has_printed = time.monotonic(), True
        return lines

    def kill(self) -> None:
        """Kill it if it still runs, without waiting."""
        if not self.has_ended:
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
        self._output.close()
