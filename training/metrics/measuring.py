"""Measure a run beyond its losses: parts of each step, MFU, sampled steps, and the bottleneck."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from training.config import layout_checks
from training.config.run_config import RunConfig
from training.config.shape import Shape
from training.engine.assembling import Assembly
from training.metrics import bottleneck, flops
from training.metrics.bottleneck import SlowRank, StepMeasurement
from training.metrics.meter import StepTimes
from training.metrics.step_trace import Sampler, StepSample
from training.parallel import fsdp
from training.reporting.reporter import AnyReporter
from training.runtime.distributed import World, sum_over_ranks
from training.step.timing import EXCHANGE, OPTIMIZER, Marks

WARM_STEPS = 5
"""First steps of an incarnation, which the bottleneck ignores: they allocate memory and compile."""
REPORT_SECONDS, MAX_REPORT_SECONDS = 300.0, 3600.0
"""Seconds between reports of the bottleneck: doubled each time, up to the longest."""


@dataclass
class _Tally:
    """Sums over steps, in seconds."""

    steps: int = 0
    last: int = 0
    step: float = 0.0
    data: float = 0.0
    checkpoint: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)

    def add(self, step: int, times: StepTimes, parts: dict[str, float]) -> None:
        self.steps, self.last = self.steps + 1, step
        self.step += times.step
        self.data += times.data
        for part, seconds in parts.items():
            self.parts[part] = self.parts.get(part, 0.0) + seconds

    def merge(self, other: _Tally) -> None:
        self.steps, self.last = self.steps + other.steps, max(self.last, other.last)
        self.step, self.data = self.step + other.step, self.data + other.data
        self.checkpoint += other.checkpoint
        for part, seconds in other.parts.items():
            self.parts[part] = self.parts.get(part, 0.0) + seconds

    def split(self, sample: StepSample | None) -> dict[str, float]:
        count = max(1, self.steps)
        return bottleneck.split_of(
            step=self.step / count,
            data=self.data / count,
            parts={part: seconds / count for part, seconds in self.parts.items()},
            checkpoint=self.checkpoint / count,
            exposed_by_part=sample.exposed_by_part if sample else None,
        )


class Measuring:
    """Times the steps on every rank; on rank 0 it also samples them and reports the bottleneck."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        assembly: Assembly,
        reporter: AnyReporter,
        *,
        slow_rank: Callable[[], SlowRank | None],
    ) -> None:
        """`slow_rank` returns the rank that the others wait for, if one has been named."""
        self._config, self._world, self._assembly, self._reporter = config, world, assembly, reporter
        self._slow_rank = slow_rank
        self._watch = assembly.model.watch
        self._sampler = Sampler(world.device, every=config.sample_seconds if world.leads else 0.0)
        self._sampling = False
        self._sample: StepSample | None = None
        self._tally, self._previous_tally = _Tally(), _Tally()
        self._steps_read = 0
        self._wait, self._next_report = REPORT_SECONDS, 0.0
        dims = assembly.task.dims
        self._flops = float(dims.flops_per_token) if dims and assembly.task.unit == "tokens" else 0.0
        self._peaks = _peaks(world) if self._flops else float("nan")

    def begin(self, *, alone: bool) -> None:
        """Begin a step, once its batch is there. `alone`: no profiler is recording."""
        self._sampling = alone and self._sampler.is_due()
        if self._sampling:
            self._sampler.begin()
        self._watch.begin()

    def end(self, step: int) -> tuple[Marks, float]:
        """End a step, which a GPU may only have queued.

        Return the marks to read later, and the seconds that measuring took.
        """
        self._watch.mark(OPTIMIZER)
        marks = self._watch.end()
        if not self._sampling:
            return marks, 0.0
        sample = self._sampler.end(step, marks)
        if sample is not None:
            self._sample = sample
            if self._world.size > 1:
                seconds = sample.exposed * sample.seconds
                self._reporter.log(step, communication_seconds=seconds, communication_share=sample.exposed)
        return marks, self._sampler.cost

    @contextmanager
    def exchanging(self, marks: Marks) -> Iterator[None]:
        """Time what infrequently synchronised replicas exchange after the step with these marks.

        Samples do not cover it.
        """
        if not self._assembly.model.exchange.has_independent_replicas:
            yield
            return
        self._watch.begin()
        yield
        self._watch.mark(EXCHANGE)
        marks += self._watch.end()

    def read(self, step: int, times: StepTimes) -> dict[str, float]:
        """Return the series of a step that the device has finished: its seconds on every rank, and more on rank 0."""
        parts = self._watch.read(times.marks)
        # The host runs ahead of a GPU: by the host's clock a step lasts only as long as launching it.
        times = replace(times, step=max(times.step, sum(parts.values())))
        self._steps_read += 1
        if not self._world.leads:
            return {"step_seconds": times.step}
        if self._steps_read > WARM_STEPS:
            self._tally.add(step, times, parts)
        series = {f"{part}_seconds": seconds for part, seconds in parts.items()} | {"step_seconds": times.step}
        if (mfu := self._mfu(times.step)) is not None:
            series["mfu"] = mfu
        return series

    def record_stall(self, step: int, seconds: float) -> None:
        """Record that training stood still for a checkpoint after this step."""
        if self._world.leads:
            self._reporter.log(step, checkpoint_seconds=seconds)
            self._tally.checkpoint += seconds

    def on_flush(self) -> None:
        """Report the bottleneck if it is due and there are new measurements."""
        if not self._world.leads or self._sample is None or self._tally.steps < bottleneck.MIN_STEPS:
            return
        if (now := time.monotonic()) >= self._next_report:
            self.report_bottleneck()
            self._next_report, self._wait = now + self._wait, min(2 * self._wait, MAX_REPORT_SECONDS)
            self._previous_tally, self._tally = self._tally, _Tally()

    def report_bottleneck(self) -> None:
        """Report what limited the steps since the last report, or also those before if these are few."""
        if not self._world.leads or not self._steps_read:
            return
        if self._tally.steps < bottleneck.MIN_STEPS:
            self._tally.merge(self._previous_tally)
            self._previous_tally = _Tally()
        tally, sample = self._tally, self._sample
        measured = self._measurement(tally, sample)
        self._reporter.event(
            "run.verdict",
            **bottleneck.judge(measured).to_dict(),
            steps=tally.steps,
            last_step=tally.last,
            step_seconds=measured.seconds,
            split=dict(measured.split),
            losses=dict(measured.losses) if measured.split else {},
            mfu=measured.mfu,
            busy=measured.busy,
            matmul=measured.matmul,
            sampled_step=sample.step if sample else None,
        )

    def _measurement(self, tally: _Tally, sample: StepSample | None) -> StepMeasurement:
        share, config = self._assembly.share, self._config
        return StepMeasurement(
            steps=tally.steps,
            split=tally.split(sample) if tally.steps else {},
            exchange=tally.parts.get(EXCHANGE, 0.0) / max(1, tally.steps),
            busy=sample.busy if sample else None,
            exposed=sample.exposed if sample else None,
            matmul=sample.matmul if sample else None,
            mfu=self._mfu(tally.step / tally.steps) if tally.steps else None,
            on_gpu=self._world.device.type == "cuda",
            world=self._world.size,
            parallelism=config.parallelism,
            dtype=config.dtype,
            compiled=config.compile,
            unusable_remedies=refused(config, self._assembly.model.shape),
            accumulation=-(-share.size // share.micro_batch),
            slow_rank=self._slow_rank(),
        )

    def _mfu(self, step_seconds: float) -> float | None:
        return flops.mfu(self._flops, self._assembly.units_per_step / max(step_seconds, 1e-9), self._peaks)


def refused(config: RunConfig, shape: Shape) -> frozenset[str]:
    """Return the remedies of a bottleneck that this run cannot use or already uses (training.metrics.bottleneck)."""
    tries = {"compile": ("compile", True), "fp8": ("dtype", "fp8")}
    names = {name for name, (setting, value) in tries.items() if _is_refused(config, shape, setting, value)}
    if not fsdp.reshards(config.options_of("fsdp").get("reshard", "auto"), has_pipeline=shape["pp"] > 1):
        names.add("reshard")
    return frozenset(names)


def _is_refused(config: RunConfig, shape: Shape, setting: str, value: object) -> bool:
    tried = config.model_copy(update={setting: value})
    return any(problem.field == setting for problem in layout_checks.check(tried, shape.world_size, allow_uneven=True))


def _peaks(world: World) -> float:
    """Return the peaks of all ranks' GPUs together in FLOP/s; NaN where one is unknown, or without GPUs."""
    if world.device.type != "cuda":
        return float("nan")
    own_peak = flops.peak(torch.cuda.get_device_name(world.device))
    return float(sum_over_ranks(world, torch.tensor(own_peak or float("nan"), dtype=torch.float64)))
