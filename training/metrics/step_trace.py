"""Sample a step now and then: when it computed, when it sent_bytes, and when it did neither.

At intervals, one step runs under torch's own recorder (kineto): on a GPU it lists the kernels, on a CPU the
operations and the work of gloo's threads. Exposed communication is the time in which something was sent and nothing
computed; it includes waiting for slower ranks. The recorder costs a few microseconds per operation, so its time is
excluded from the step's, and the next sample waits until this one cost less than 0.5 % of the time.
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
"""Steps before the first sample: the first steps allocate memory and compile."""
COST_RATIO = 200.0
"""Seconds of training for each second that a sample costs."""

_COMMUNICATION = re.compile(
    r"^(gloo|nccl|c10d|_c10d_functional|c10d_functional|mpi|ucc):|nccl|AllReduce|record_param_comms"
)
_ELSEWHERE = re.compile(r"^(autograd|profiler|FSDP|Optimizer|ProfilerStep)")
_MATMUL = re.compile(
    r"mm$|mm_|matmul|gemm|conv|attention|flash|fmha|cutlass|nvjet|wgmma|xmma|cublas|mkldnn|linear", re.IGNORECASE
)

Span = tuple[float, float]
"""Beginning and end in seconds on one clock."""


@dataclass(frozen=True, kw_only=True)
class TracedOperation:
    """A kernel, an operation or a transfer."""

    name: str
    begin: float
    end: float
    thread: int = 0
    is_async: bool = False
    """Whether it runs in parallel to its thread: a transfer, a kernel."""


@dataclass(frozen=True, kw_only=True)
class StepSample:
    """The profile of one step on this rank.

    Times are fractions of the time from the step's beginning to its end, without waiting for data.
    """

    step: int
    seconds: float
    busy: float
    """Fraction in which something was computed."""
    exposed: float
    """Fraction in which something was sent and nothing computed."""
    matmul: float
    """Fraction of the computing time spent on matrix products, attention and convolutions."""
    exposed_by_part: dict[str, float] = field(default_factory=dict)
    """For each part of the step, the exposed fraction of its time."""


class Sampler:
    """Takes one rank's samples. `every`: minimum seconds of training between two samples; 0: none."""

    def __init__(self, device: torch.device, *, every: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._on_gpu, self._every, self._clock = device.type == "cuda", every, clock
        self._steps, self._next = 0, 0.0
        self._began = self._clock_offset = 0.0
        self.cost = 0.0
        """Seconds that the last sample took in addition to the step."""

    def is_due(self) -> bool:
        """Return whether the next step is to be sampled; called before each step."""
        if not self._every:
            return False
        self._steps += 1
        if self._steps == 1:
            self._next = self._clock() + self._every / 4
        return self._steps > WARM_STEPS and self._clock() >= self._next

    def begin(self) -> None:
        began = self._clock()
        silence_kineto()
        activities = {_activity("CUDA" if self._on_gpu else "CPU")}
        if self._on_gpu:
            torch.cuda.synchronize()
        torch.autograd._prepare_profiler(_config(), activities)  # type: ignore[attr-defined]
        torch.autograd._enable_profiler(_config(), activities)  # type: ignore[attr-defined]
        self._clock_offset = time.time() - time.perf_counter()
        self._began = time.time()
        self.cost = self._clock() - began

    def end(self, step: int, marks: Marks) -> StepSample | None:
        """Return the sample of the step since `begin`; None if the recorder recorded nothing."""
        if self._on_gpu:
            torch.cuda.synchronize()
        began = self._clock()
        recording = torch.autograd._disable_profiler()  # type: ignore[attr-defined]
        operations = self._operations(recording.events())
        sample = analyze(step, operations, self._windows(operations, marks), on_gpu=self._on_gpu)
        self.cost += self._clock() - began
        self._next = self._clock() + max(self._every, COST_RATIO * self.cost)
        return sample

    def _operations(self, events: Iterable[Any]) -> list[TracedOperation]:
        operations = []
        for event in events:
            on_device = "CUDA" in str(event.device_type())
            if on_device != self._on_gpu:
                continue
            begin = event.start_ns() / 1e9
            operations.append(
                TracedOperation(
                    name=event.name(),
                    begin=begin,
                    end=begin + event.duration_ns() / 1e9,
                    thread=event.start_thread_id(),
                    is_async=on_device or event.is_async(),
                )
            )
        return operations

    def _windows(self, operations: Sequence[TracedOperation], marks: Marks) -> list[tuple[str, Span]]:
        """Return when each part of the step was, on the recorder's clock."""
        if self._on_gpu:  # events give durations only: the first one begins with the first kernel
            at = min((operation.begin for operation in operations), default=self._began)
            windows = []
            for (_, before), (part, after) in zip(marks, marks[1:], strict=False):
                seconds = before.elapsed_time(after) / 1000
                windows.append((part, (at, at + seconds)))
                at += seconds
            return windows
        moments = [(part, self._clock_offset + moment) for part, moment in marks]
        return [(part, (before, after)) for (_, before), (part, after) in zip(moments, moments[1:], strict=False)]


def analyze(
    step: int, operations: Sequence[TracedOperation], windows: Sequence[tuple[str, Span]], *, on_gpu: bool
) -> StepSample | None:
    """Analyze the recorded operations of a step whose parts were in these windows."""
    if not windows or not operations:
        return None
    span = (windows[0][1][0], windows[-1][1][1])
    seconds = span[1] - span[0]
    if seconds <= 0:
        return None
    sent = merge_spans((o.begin, o.end) for o in operations if o.is_async and _COMMUNICATION.search(o.name))
    if on_gpu:
        pieces = [(o.name, (o.begin, o.end)) for o in operations if not _COMMUNICATION.search(o.name)]
    else:
        pieces = [(name, piece) for name, piece in innermost(operations) if _computes(name)]
    computed = merge_spans(piece for _, piece in pieces)
    exposed = subtract_spans(sent, computed)
    products = merge_spans(piece for name, piece in pieces if _MATMUL.search(name))
    busy = total_length(clip_spans(computed, span))
    by_part: dict[str, list[float]] = {}
    for part, window in windows:
        totals = by_part.setdefault(part, [0.0, 0.0])
        totals[0] += total_length(clip_spans(exposed, window))
        totals[1] += window[1] - window[0]
    return StepSample(
        step=step,
        seconds=seconds,
        busy=min(1.0, busy / seconds),
        exposed=min(1.0, total_length(clip_spans(exposed, span)) / seconds),
        matmul=total_length(clip_spans(products, span)) / busy if busy else 0.0,
        exposed_by_part={part: min(1.0, lost / whole) for part, (lost, whole) in by_part.items() if part and whole > 0},
    )


def _computes(name: str) -> bool:
    """Return whether the operation computes: those have a namespace (aten::mm), unlike what merely surrounds them."""
    if _COMMUNICATION.search(name) or _ELSEWHERE.search(name):
        return False
    return "::" in name or "fused" in name


def innermost(operations: Iterable[TracedOperation]) -> list[tuple[str, Span]]:
    """Split time into stretches by the innermost of nested operations."""
    stretches: list[tuple[str, Span]] = []
    open_: list[tuple[TracedOperation, float]] = []
    thread = None

    def close(until: float) -> None:
        while open_ and open_[-1][0].end <= until:
            operation, since = open_.pop()
            if operation.end > since:
                stretches.append((operation.name, (since, operation.end)))
            if open_:
                open_[-1] = (open_[-1][0], max(open_[-1][1], operation.end))

    for operation in sorted((o for o in operations if not o.is_async), key=lambda o: (o.thread, o.begin, -o.end)):
        if operation.thread != thread:
            close(float("inf"))
            thread = operation.thread
        close(operation.begin)
        if open_ and operation.begin > open_[-1][1]:
            stretches.append((open_[-1][0].name, (open_[-1][1], operation.begin)))
        open_.append((operation, operation.begin))
    close(float("inf"))
    return stretches


def merge_spans(spans: Iterable[Span]) -> list[Span]:
    """Merge spans that touch or overlap, and sort them."""
    merged: list[Span] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def subtract_spans(spans: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Return the parts of merged spans that lie in none of the others (merged too)."""
    rest: list[Span] = []
    ends = [end for _, end in others]
    for begin, end in spans:
        for low, high in others[bisect_right(ends, begin) :]:
            if low >= end:
                break
            if low > begin:
                rest.append((begin, low))
            begin = high
        if begin < end:
            rest.append((begin, end))
    return rest


def clip_spans(spans: Iterable[Span], window: Span) -> list[Span]:
    cut = [(max(begin, window[0]), min(end, window[1])) for begin, end in spans]
    return [(begin, end) for begin, end in cut if begin < end]


def total_length(spans: Iterable[Span]) -> float:
    return sum(end - begin for begin, end in spans)


def silence_kineto() -> None:
    """Keep kineto from logging every start to stderr; must run before its first start."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def _activity(name: str) -> Any:
    from torch.autograd import ProfilerActivity  # type: ignore[attr-defined]

    return getattr(ProfilerActivity, name)


def _config() -> Any:
    from torch._C._profiler import _ExperimentalConfig
    from torch.autograd import ProfilerConfig, ProfilerState  # type: ignore[attr-defined]

    return ProfilerConfig(ProfilerState.KINETO, False, False, False, False, False, _ExperimentalConfig())
