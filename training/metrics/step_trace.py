"""One step looked at from inside, now and then: what it computed, what it sent, and where it did neither.

A step in so many seconds runs under torch's own recorder (kineto): on a GPU it lists the kernels, on a CPU the
operations and what gloo's threads did. Exposed communication is the time in which something was being sent and nothing
computed; it includes waiting for slower ranks. The recorder costs a few microseconds an operation, so what it lasts is
kept out of the step's own time, and the next sample waits until this one's cost is under 0.5 % of the time.
"""

from __future__ import annotations

import os
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from training.step.timing import Marks

WARM_STEPS = 10
"""Steps before the first sample: the first ones allocate, and compile."""
COST = 200.0
"""Seconds of training for each second that a sample cost."""

_COMMUNICATION = re.compile(
    r"^(gloo|nccl|c10d|_c10d_functional|c10d_functional|mpi|ucc):|nccl|AllReduce|record_param_comms"
)
_ELSEWHERE = re.compile(r"^(autograd|profiler|FSDP|Optimizer|ProfilerStep)")
_MATMUL = re.compile(
    r"mm$|mm_|matmul|gemm|conv|attention|flash|fmha|cutlass|nvjet|wgmma|xmma|cublas|mkldnn|linear", re.IGNORECASE
)

Span = tuple[float, float]
"""Beginning and end, in seconds of one clock."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """A kernel, an operation or a transfer."""

    name: str
    begin: float
    end: float
    thread: int = 0
    apart: bool = False
    """It runs beside whatever its thread does: a transfer, a kernel."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What one step on this rank showed, in parts of the time from its begin to its end (data left out)."""

    step: int
    seconds: float
    busy: float
    """The part in which something was computed."""
    exposed: float
    """The part in which something was sent and nothing computed."""
    matmul: float
    """The part of what was computed that is products of matrices, attention and convolutions."""
    exposed_by_part: dict[str, float] = field(default_factory=dict)
    """What was exposed in each part of the step, as a part of that part's own time."""


class Sampler:
    """Takes one rank's samples. `every`: seconds of training between two of them at the least; 0: none."""

    def __init__(self, device: torch.device, *, every: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._on_gpu, self._every, self._clock = device.type == "cuda", every, clock
        self._steps, self._next = 0, 0.0
        self._began = self._clocks = 0.0
        self.cost = 0.0
        """Seconds that the last one took beside the step."""

    def due(self) -> bool:
        """Asked before each step, whether this one is to be sampled."""
        if not self._every:
            return False
        self._steps += 1
        if self._steps == 1:
            self._next = self._clock() + self._every / 4
        return self._steps > WARM_STEPS and self._clock() >= self._next

    def begin(self) -> None:
        began = self._clock()
        hush()
        activities = {_activity("CUDA" if self._on_gpu else "CPU")}
        if self._on_gpu:
            torch.cuda.synchronize()
        torch.autograd._prepare_profiler(_config(), activities)  # type: ignore[attr-defined]
        torch.autograd._enable_profiler(_config(), activities)  # type: ignore[attr-defined]
        self._clocks = time.time() - time.perf_counter()
        self._began = time.time()
        self.cost = self._clock() - began

    def end(self, step: int, marks: Marks) -> Sample | None:
        """What the step since `begin` showed; None where the recorder saw nothing."""
        if self._on_gpu:
            torch.cuda.synchronize()
        began = self._clock()
        found = torch.autograd._disable_profiler()  # type: ignore[attr-defined]
        operations = self._operations(found.events())
        sample = look(step, operations, self._windows(operations, marks), on_gpu=self._on_gpu)
        self.cost += self._clock() - began
        self._next = self._clock() + max(self._every, COST * self.cost)
        return sample

    def _operations(self, events: Iterable[Any]) -> list[Operation]:
        found = []
        for event in events:
            on_device = "CUDA" in str(event.device_type())
            if on_device != self._on_gpu:
                continue
            begin = event.start_ns() / 1e9
            found.append(
                Operation(
                    name=event.name(),
                    begin=begin,
                    end=begin + event.duration_ns() / 1e9,
                    thread=event.start_thread_id(),
                    apart=on_device or event.is_async(),
                )
            )
        return found

    def _windows(self, operations: Sequence[Operation], marks: Marks) -> list[tuple[str, Span]]:
        """When each part was, on the recorder's clock."""
        if self._on_gpu:  # events tell durations: the first begins with the first kernel
            at = min((operation.begin for operation in operations), default=self._began)
            windows = []
            for (_, before), (part, after) in zip(marks, marks[1:], strict=False):
                seconds = before.elapsed_time(after) / 1000
                windows.append((part, (at, at + seconds)))
                at += seconds
            return windows
        moments = [(part, self._clocks + moment) for part, moment in marks]
        return [(part, (before, after)) for (_, before), (part, after) in zip(moments, moments[1:], strict=False)]


def look(
    step: int, operations: Sequence[Operation], windows: Sequence[tuple[str, Span]], *, on_gpu: bool
) -> Sample | None:
    """What recorded operations say of a step whose parts were in these windows."""
    if not windows or not operations:
        return None
    span = (windows[0][1][0], windows[-1][1][1])
    seconds = span[1] - span[0]
    if seconds <= 0:
        return None
    sent = joined((o.begin, o.end) for o in operations if o.apart and _COMMUNICATION.search(o.name))
    if on_gpu:
        pieces = [(o.name, (o.begin, o.end)) for o in operations if not _COMMUNICATION.search(o.name)]
    else:
        pieces = [(name, piece) for name, piece in innermost(operations) if _computes(name)]
    computed = joined(piece for _, piece in pieces)
    exposed = without(sent, computed)
    products = joined(piece for name, piece in pieces if _MATMUL.search(name))
    busy = length(within(computed, span))
    by_part: dict[str, list[float]] = {}
    for part, window in windows:
        totals = by_part.setdefault(part, [0.0, 0.0])
        totals[0] += length(within(exposed, window))
        totals[1] += window[1] - window[0]
    return Sample(
        step=step,
        seconds=seconds,
        busy=min(1.0, busy / seconds),
        exposed=min(1.0, length(within(exposed, span)) / seconds),
        matmul=length(within(products, span)) / busy if busy else 0.0,
        exposed_by_part={part: min(1.0, lost / whole) for part, (lost, whole) in by_part.items() if part and whole > 0},
    )


def _computes(name: str) -> bool:
    """Operations have a namespace (aten::mm); what only surrounds them has none, or one of its own."""
    if _COMMUNICATION.search(name) or _ELSEWHERE.search(name):
        return False
    return "::" in name or "fused" in name


def innermost(operations: Iterable[Operation]) -> list[tuple[str, Span]]:
    """The innermost of nested operations, stretch by stretch."""
    found: list[tuple[str, Span]] = []
    open_: list[tuple[Operation, float]] = []
    thread = None

    def close(until: float) -> None:
        while open_ and open_[-1][0].end <= until:
            operation, since = open_.pop()
            if operation.end > since:
                found.append((operation.name, (since, operation.end)))
            if open_:
                open_[-1] = (open_[-1][0], max(open_[-1][1], operation.end))

    for operation in sorted((o for o in operations if not o.apart), key=lambda o: (o.thread, o.begin, -o.end)):
        if operation.thread != thread:
            close(float("inf"))
            thread = operation.thread
        close(operation.begin)
        if open_ and operation.begin > open_[-1][1]:
            found.append((open_[-1][0].name, (open_[-1][1], operation.begin)))
        open_.append((operation, operation.begin))
    close(float("inf"))
    return found


def joined(spans: Iterable[Span]) -> list[Span]:
    """The spans in order, those that touch being one."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def without(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """What of joined spans lies in none of the others, joined too."""
    found: list[Span] = []
    ends = [end for _, end in others]
    for begin, end in spans:
        for low, high in others[bisect_right(ends, begin) :]:
            if low >= end:
                break
            if low > begin:
                found.append((begin, low))
            begin = high
        if begin < end:
            found.append((begin, end))
    return found


def within(spans: Iterable[Span], window: Span) -> list[Span]:
    cut = [(max(begin, window[0]), min(end, window[1])) for begin, end in spans]
    return [(begin, end) for begin, end in cut if begin < end]


def length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def hush() -> None:
    """Kineto says every start on stderr, unless it is told not to before its first."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def _activity(name: str) -> Any:
    from torch.autograd import ProfilerActivity  # type: ignore[attr-defined]

    return getattr(ProfilerActivity, name)


def _config() -> Any:
    from torch._C._profiler import _ExperimentalConfig
    from torch.autograd import ProfilerConfig, ProfilerState  # type: ignore[attr-defined]

    return ProfilerConfig(ProfilerState.KINETO, False, False, False, False, False, _ExperimentalConfig())
