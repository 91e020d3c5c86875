"""What a run tells of itself beside its losses: parts of each step, MFU, samples from inside, and what bounds it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from training.config.run_config import RunConfig
from training.config.shape import Shape
from training.engine.assembling import Assembly
from training.metrics import bottleneck, flops
from training.metrics.bottleneck import Late, Measured
from training.metrics.meter import StepTimes
from training.metrics.step_trace import Sample, Sampler
from training.parallel import fsdp
from training.reporting.reporter import AnyReporter
from training.runtime.distributed import World, sum_over_ranks
from training.step.timing import EXCHANGE, OPTIMIZER, Marks

WARM_STEPS = 5
"""The first of an incarnation, which the bottleneck is told without: they allocate, and compile."""
TOLD_SECONDS, LONGEST = 300.0, 3600.0
"""Seconds until the bottleneck is told anew: each time twice as long, up to the longest."""


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

    def split(self, sample: Sample | None) -> dict[str, float]:
        count = max(1, self.steps)
        return bottleneck.split_of(
            step=self.step / count,
            data=self.data / count,
            parts={part: seconds / count for part, seconds in self.parts.items()},
            checkpoint=self.checkpoint / count,
            exposed_by_part=sample.exposed_by_part if sample else None,
        )


class Measuring:
    """The watch of every rank, and on rank 0 what is made of it."""

    def __init__(
        self,
        config: RunConfig,
        world: World,
        assembly: Assembly,
        reporter: AnyReporter,
        *,
        late: Callable[[], Late | None],
    ) -> None:
        """`late` tells which rank the others wait for, if one is named."""
        self._config, self._world, self._assembly, self._reporter = config, world, assembly, reporter
        self._late = late
        self._watch = assembly.model.watch
        self._sampler = Sampler(world.device, every=config.sample_seconds if world.leads else 0.0)
        self._sampling = False
        self._sample: Sample | None = None
        self._tally, self._before = _Tally(), _Tally()
        self._seen = 0
        self._wait, self._next_telling = TOLD_SECONDS, 0.0
        dims = assembly.task.dims
        self._flops = float(dims.flops_per_token) if dims and assembly.task.unit == "tokens" else 0.0
        self._peaks = _peaks(world) if self._flops else float("nan")

    def begin(self, *, alone: bool) -> None:
        """The step's own work begins: its batch is there. `alone`: nothing else is recording."""
        self._sampling = alone and self._sampler.due()
        if self._sampling:
            self._sampler.begin()
        self._watch.begin()

    def end(self, step: int) -> tuple[Marks, float]:
        """It is done, on a GPU perhaps only queued; what is to be read later, and the seconds that measuring took."""
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
        """Surrounds what replicas that stay apart send each other after a step, whose marks these are. No sample sees
        it: it is not in every step."""
        if not self._assembly.model.exchange.is_apart:
            yield
            return
        self._watch.begin()
        yield
        self._watch.mark(EXCHANGE)
        marks += self._watch.end()

    def read(self, step: int, times: StepTimes) -> dict[str, float]:
        """Series of a step, once the device has come this far: its seconds, and for rank 0 to report more."""
        parts = self._watch.read(times.marks)
        # The host runs ahead of a GPU: by its own clock a step lasts only as long as it takes to ask for one.
        times = replace(times, step=max(times.step, sum(parts.values())))
        self._seen += 1
        if not self._world.leads:
            return {"step_seconds": times.step}
        if self._seen > WARM_STEPS:
            self._tally.add(step, times, parts)
        found = {f"{part}_seconds": seconds for part, seconds in parts.items()} | {"step_seconds": times.step}
        if (reached := self._mfu(times.step)) is not None:
            found["mfu"] = reached
        return found

    def stalled(self, step: int, seconds: float) -> None:
        """Training stood still for a checkpoint after this step."""
        if self._world.leads:
            self._reporter.log(step, checkpoint_seconds=seconds)
            self._tally.checkpoint += seconds

    def flushed(self) -> None:
        """Everything up to here has been read: tells the bottleneck if it is due and there is something new to say."""
        if not self._world.leads or self._sample is None or self._tally.steps < bottleneck.LEAST_STEPS:
            return
        if (now := time.monotonic()) >= self._next_telling:
            self.tell()
            self._next_telling, self._wait = now + self._wait, min(2 * self._wait, LONGEST)
            self._before, self._tally = self._tally, _Tally()

    def tell(self) -> None:
        """Tells what bounded the steps since the last time, or more where those are few; nothing where none is seen."""
        if not self._world.leads or not self._seen:
            return
        if self._tally.steps < bottleneck.LEAST_STEPS:
            self._tally.merge(self._before)
            self._before = _Tally()
        tally, sample = self._tally, self._sample
        measured = self._measured(tally, sample)
        self._reporter.event(
            "run.verdict",
            **bottleneck.judge(measured).told(),
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

    def _measured(self, tally: _Tally, sample: Sample | None) -> Measured:
        share, config = self._assembly.share, self._config
        return Measured(
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
            refused=refused(config, self._assembly.model.shape),
            accumulation=-(-share.size // share.micro_batch),
            late=self._late(),
        )

    def _mfu(self, step_seconds: float) -> float | None:
        return flops.mfu(self._flops, self._assembly.units_per_step / max(step_seconds, 1e-9), self._peaks)


def refused(config: RunConfig, shape: Shape) -> frozenset[str]:
    """The remedies of a bottleneck that this run can't take, or takes already (training.metrics.bottleneck)."""
    tries = {"compile": ("compile", True), "fp8": ("dtype", "fp8")}
    found = {name for name, (setting, value) in tries.items() if _is_refused(config, shape, setting, value)}
    if not fsdp.lets_go(config.options_of("fsdp").get("reshard", "auto"), is_piped=shape["pp"] > 1):
        found.add("reshard")
    return frozenset(found)


def _is_refused(config: RunConfig, shape: Shape, setting: str, value: object) -> bool:
    tried = config.model_copy(update={setting: value})
    return any(problem.field == setting for problem in tried.check(shape.world_size, lacking=True))


def _peaks(world: World) -> float:
    """The peaks of all ranks' GPUs together, FLOP/s; NaN where one is not known, or there is none."""
    if world.device.type != "cuda":
        return float("nan")
    mine = flops.peak(torch.cuda.get_device_name(world.device))
    return float(sum_over_ranks(world, torch.tensor(mine or float("nan"), dtype=torch.float64)))
