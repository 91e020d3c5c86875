"""The training loop: reads a run's configuration, trains to the end or to a stop, and leaves checkpoints and reports.

The order at a step's boundary is: agree on stopping, validate, save, report. Everything that decides the numbers is a
function of the configuration and the step, or lies in the checkpoint; so a run that was killed and resumed continues
with the very same losses (PROTOCOLS §4).
"""

from __future__ import annotations

import importlib
import platform
import sys
import time
from typing import Any

import torch
from torch import nn

from training import meshes, supply
from training import step as arithmetic
from training.best import BestLosses
from training.cadence import Cadence, mtbf, nodes_here
from training.checkpoint import (
    Checkpoints,
    Facts,
    Remembers,
    check_fence,
    load_start,
    recall,
    remember,
    tell_committed,
)
from training.composing import Composed
from training.config import ConfigError, Problem, RunConfig
from training.data import Loader, Order, Share, Task, cache_dir, derive_seed, fixed_batch
from training.distributed import Agreed, Agreement, World, sum_over_ranks
from training.feeding import Feed, Part
from training.heartbeat import Heartbeat, NullHeartbeat
from training.manifest import Manifest
from training.metrics import Meter, StepTimes
from training.norms import GradientNorm
from training.place import Place
from training.pruning import Keep
from training.report import AnyReporter
from training.step import MicroBatch
from training.stopping import Stopped, StopRequest

DISCARDED = 2**32
"""Stands for a step's number in the seed of the pass that is thrown away."""


class Trainer:
    """One rank's run."""

    def __init__(
        self,
        config: RunConfig,
        place: Place,
        world: World,
        *,
        reporter: AnyReporter,
        heartbeat: Heartbeat | NullHeartbeat,
        stop: StopRequest,
        mtbf_hours: float | None = None,
    ) -> None:
        """`mtbf_hours`: between failures of this run's nodes, as the portal has seen them."""
        self.config, self.place, self.world = config, place, world
        self.reporter, self.heartbeat, self.stop = reporter, heartbeat, stop
        self.agreement = Agreement(world)
        self.step = 0
        self.consumed = 0
        self.best_validation_loss: float | None = None
        self.validation_loss: float | None = None
        self.validated_step: int | None = None
        self.best = BestLosses(config.keep_best)
        self.cadence = Cadence(
            config.checkpoint_every,
            mtbf(config.mtbf_hours, mtbf_hours, nodes_here()),
            keep_every=config.keep_every,
        )
        self.remembers: dict[str, Remembers] = {"cadence": self.cadence, "best": self.best}
        """What goes on from plain values in a checkpoint, by the name under which they lie there."""
        self.checkpoints = Checkpoints(
            place.job_dir,
            place.attempt_dir,
            world,
            generation=place.generation,
            keep=Keep(last=config.keep_checkpoints, every=config.keep_every, best=config.keep_best),
            cadence=self.cadence,
            reporter=reporter,
        )

    def run(self) -> bool:
        """Trains; True if to the end, False if it was asked to stop and left a checkpoint."""
        check_fence(self.place.job_dir, self.place.generation)
        start = load_start(self.checkpoints, self.world, self.place.resume)
        self.checkpoints.start_from(start)
        self._prepare(start)
        self._begin(start)
        stopping = self.agreement.now(stop=self.stop.asked).stop
        if not stopping and self._owes_validation(start):
            stopping = self._validate()
        while not stopping and self.step < self.config.steps:
            agreed = self._one_step()
            stopping = agreed.stop or self._between_steps(agreed)
        return self._finish(stopping)

    # Setting up.

    def _prepare(self, start: Manifest | None) -> None:
        """Data, model, optimizer; then one pass that is thrown away, and only then the state."""
        config, world = self.config, self.world
        recipe = importlib.import_module(f"training.recipes.{config.recipe}")
        self._check(start)
        self._phase("data")
        self.prepared = supply.prepare(
            recipe,
            config,
            world,
            cache=cache_dir(self.place.run_dir),
            identity=start.data if start else None,
            heartbeat=self.heartbeat,
            reporter=self.reporter,
        )
        torch.manual_seed(derive_seed(config.seed))
        self.task: Task = supply.build(recipe, config, self.prepared)
        self.model = Composed(self.task, config, world)
        self.share = self._share(*meshes.coordinate(self.model.mesh), start)
        self.loader = Loader(Order(self.task.samples["train"], derive_seed(config.seed, 1)), self.share)
        end = config.steps * config.global_batch
        self.feed = Feed(self.task, self.loader, divide=self.model.divide, device=world.device, end=end)
        self.optimizer = self.model.optimizer()
        self.norm = GradientNorm(self.optimizer.parameters, self.model.shape)
        self.meter = self._meter()
        self._phase("compile")
        self._discarded_pass()
        if start is not None:
            self._phase("restore")
            self._restore(start)

    def _check(self, start: Manifest | None) -> None:
        """A fresh run must divide evenly over its ranks; one that has lost some goes on with what it has."""
        if start is None or start.world_size == self.world.size:
            problems = list(self.config.check(self.world.size))
            if problems:
                raise ConfigError(Problem(f"run.{problem.field}", problem.message) for problem in problems)
        elif self.config.global_batch < self.world.size:
            message = f"{self.config.global_batch} samples leave nothing to do for some of {self.world.size} ranks."
            raise ConfigError([Problem("run.global_batch", message)])
        if start is not None:
            _check_same_model(self.config, start)

    def _share(self, index: int, count: int, start: Manifest | None) -> Share:
        """The micro-batch stays what it was when ranks are lost: memory doesn't grow, accumulation does."""
        batch = self.config.global_batch
        before = start.layout.get("micro_batch") if start else None
        fresh = self.model.micro_batch
        micro = self.config.micro_batch or (before if isinstance(before, int) and not self.model.is_piped else fresh)
        return Share(index, count, batch, micro)

    def _meter(self) -> Meter:
        return Meter(
            self.reporter,
            leads=self.world.leads,
            unit=self.task.unit,
            units_per_step=self._units_per_step,
            flush_steps=self.config.flush_steps,
            flush_seconds=self.config.flush_seconds,
            say=self._say,
            device=self.world.device,
        )

    @property
    def _units_per_step(self) -> int:
        return self.config.global_batch * self.task.units_per_sample

    def _discarded_pass(self) -> None:
        """One forward and backward whose result is thrown away, at every start, fresh or resumed.

        DDP rebuilds its buckets after its first backward, so that pass adds gradients in another order than all later
        ones; without this, a resumed run would differ from one that went on.
        """
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        ids = self.loader.ids(0)
        parts = [self.feed.look_up("train", part) for part in (ids if self.model.is_piped else ids[:1])]
        self.model.forward_backward(self._micro_batches(parts, DISCARDED))
        self.optimizer.zero_grad()
        for buffer, before in zip(self.model.buffers(), buffers, strict=True):
            buffer.copy_(before)

    def _restore(self, start: Manifest) -> None:
        self.checkpoints.restore(self._state(), start)
        self.step, self.consumed = start.step, start.consumed_samples
        best = start.state.get("best_validation_loss")
        self.best_validation_loss = float(best) if best is not None else None
        self.validated_step = start.state.get("validated_step")
        recall(self.remembers, start)

    def _owes_validation(self, start: Manifest | None) -> bool:
        """Whether the run stopped at a step whose validation was due and not finished: the next start does it first."""
        if start is None or "validated_step" not in start.state:
            return False
        return self._validates_here() and self.validated_step != self.step

    def _validates_here(self) -> bool:
        every = self.config.validate_every
        return bool(every) and (self.step == self.config.steps or self.step % every == 0)

    def _state(self) -> dict[str, Any]:
        """What a checkpoint holds: the very tensors, to copy from or to read into."""
        return {"model": self.model.state(), "optimizer": self.optimizer.state()}

    def _begin(self, start: Manifest | None) -> None:
        if not self.world.leads:
            return
        if start is not None:
            tell_committed(self.reporter, start)  # perhaps it died between commit and report; the portal takes it once
        parameters = self.task.dims.parameters if self.task.dims else _count(self.task.model)
        self.reporter.event(
            "run.started",
            recipe=self.config.recipe,
            parallelism=self.config.parallelism,
            mesh=dict(self.model.shape),
            steps=self.config.steps,
            start_step=self.step,
            world_size=self.world.size,
            device=self.world.device.type,
            parameters=parameters,
            tokens_per_step=self._units_per_step,
            unit=self.task.unit,
            micro_batch=self.share.micro_batch,
            resumed_from=start.name if start else None,
            versions=_versions(),
            **self.task.facts,
        )
        supply.tell_prepared(self.reporter, self.prepared, self.task, self.share)
        self._phase("step")
        came = f"from {start.name}" if start else "afresh"
        ranks = f"{self.world.size} rank{'s' * (self.world.size > 1)} on {self.world.device.type}"
        self._say(f"{self.config.recipe}: {parameters:,} parameters, {ranks}, {came}, {self.config.steps} steps")

    # The loop.

    def _one_step(self) -> Agreed:
        """One optimizer step, and what the ranks agreed on beside it."""
        began = time.perf_counter()
        self.heartbeat.beat("data", self.step)
        due = self.world.leads and self.cadence.due(self.step + 1)
        self.agreement.begin(stop=self.stop.asked, saving=self.checkpoints.busy, due=due)
        micro_batches = self._micro_batches(self.feed.take(self.consumed), self.step)
        self.heartbeat.beat("step", self.step)
        loss = self.model.forward_backward(micro_batches)
        norm = self.norm()
        rate = arithmetic.learning_rate(self.config, self.step)
        self.optimizer.step(rate, arithmetic.clip_scale(norm, self.config.clip))
        self.optimizer.zero_grad()
        self.step += 1
        self.consumed += self.config.global_batch
        agreed = self.agreement.end()
        times = StepTimes(step=time.perf_counter() - began, data=self.feed.waited)
        self.cadence.note_step(times.step, saving=agreed.saving)
        self.meter.record(self.step, loss=loss, norm=norm, learning_rate=rate, times=times)
        return agreed

    def _micro_batches(self, parts: list[Part], step: int) -> list[MicroBatch]:
        return [
            MicroBatch(
                batch=part.batch,
                weight=len(part.ids) * self.share.count / self.share.global_batch,
                share=len(part.ids) / self.share.size,
                seed=derive_seed(self.config.seed, step, number, self.share.index),
            )
            for number, part in enumerate(parts)
        ]

    def _between_steps(self, agreed: Agreed) -> bool:
        """What is due at this boundary; True if a validation was cut short because a rank was asked to stop."""
        self.checkpoints.settle()
        last = self.step == self.config.steps
        if self._validates_here() and self._validate():
            return True
        validated = self.validated_step == self.step and self.validation_loss is not None
        if validated and self.best.enters(self.validation_loss) and not last:  # type: ignore[arg-type]
            self.checkpoints.finish_flight()
            self._save()
        elif agreed.due and not last:
            if agreed.saving:
                self.checkpoints.skip(self.step)
            else:
                self._save()
        return False

    def _validate(self) -> bool:
        """Means over the first global batches of the validation data; True if cut short by a stop."""
        self.meter.flush()
        self._phase("validate")
        samples = self.task.samples["validation"]
        batches = min(self.config.validation_batches, -(-samples // self.config.global_batch))
        sums: dict[str, torch.Tensor] = {}
        seen = 0
        stopping = False
        self.model.train(False)
        with torch.no_grad():
            for batch in range(batches):
                self.heartbeat.beat("validate", self.step)
                for ids in fixed_batch(batch, samples=samples, share=self.share):
                    seen += len(ids)
                    for name, mean in self.model.score(self.feed.look_up("validation", ids).batch).items():
                        sums[name] = sums.get(name, torch.zeros(())) + mean.double() * len(ids)
                stopping = self.agreement.now(stop=self.stop.asked).stop
                if stopping:
                    break
        self.model.train()
        if not stopping:
            self._report_validation(sums, seen)
        self._phase("step")
        return stopping

    def _report_validation(self, sums: dict[str, torch.Tensor], seen: int) -> None:
        names = sorted(sums)
        flat = torch.tensor([*(sums[name] for name in names), seen], dtype=torch.float64)
        *totals, count = sum_over_ranks(self.world, flat).tolist()
        means = {name: total / count for name, total in zip(names, totals, strict=True)}
        self.validated_step, self.validation_loss = self.step, means["loss"]
        if self.best_validation_loss is None or means["loss"] < self.best_validation_loss:
            self.best_validation_loss = means["loss"]
        if self.world.leads:
            self.reporter.log(self.step, **{f"validation_{name}": mean for name, mean in means.items()})
            self._say(
                f"step {self.step}  " + "  ".join(f"validation {name} {mean:.4f}" for name, mean in means.items())
            )

    def _save(self) -> None:
        self.meter.flush()
        self.heartbeat.beat("save", self.step)
        layout = {
            "parallelism": self.config.parallelism,
            "axes": dict(self.model.shape),
            "micro_batch": self.share.micro_batch,
            "device": self.world.device.type,
            "threads": torch.get_num_threads(),
        }
        facts = Facts(
            step=self.step,
            consumed_samples=self.consumed,
            layout=layout,
            config_hash=self.config.hash(),
            config=self.config.numerics(),
            data=self.prepared.identity,
            state={
                "best_validation_loss": self.best_validation_loss,
                "validated_step": self.validated_step,
                "validation_loss": self.validation_loss if self.validated_step == self.step else None,
                **remember(self.remembers),
            },
            versions=_versions(),
        )
        self.checkpoints.save(self._state(), facts)
        self.heartbeat.beat("step", self.step)

    # The end.

    def _finish(self, stopping: bool) -> bool:
        """The last checkpoint, committed before anybody leaves."""
        self.feed.close()
        self.meter.flush()
        reason = self.stop.why()
        if stopping and self.world.leads and not self.place.launched:  # the launcher has told it
            self.reporter.event("stop.requested", reason=reason)
        self._phase("save")
        last = self._last_checkpoint()
        if self.world.leads:
            if stopping:
                Stopped(last.step, last.name, last.generation, reason).write(self.place.attempt_dir)
                self.reporter.event("stop.saved", step=self.step)
            else:
                self.reporter.event("run.completed", step=self.step)
            self._say(f"{'stopped' if stopping else 'completed'} at step {self.step}, saved as {last.name}")
        self.heartbeat.beat("end", self.step)
        return not stopping

    def _last_checkpoint(self) -> Manifest:
        self.checkpoints.finish_flight()
        latest = self.checkpoints.latest
        if latest is not None and latest.step == self.step:
            return latest
        self._save()
        return self.checkpoints.wait()

    def _phase(self, phase: str) -> None:
        self.heartbeat.beat(phase, self.step)
        if self.world.leads:
            self.reporter.event("phase", phase=phase, step=self.step)

    def _say(self, text: str) -> None:
        if self.world.leads:
            print(text, flush=True)


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def set_determinism(wanted: str) -> None:
    """bitwise: only kernels that give the same bits every time. fast: whatever is fastest."""
    if "torch._inductor" in sys.modules:
        torch.use_deterministic_algorithms(wanted == "bitwise")
    else:
        # The public function also tells torch.compile, importing it for that: as long again as torch's own import.
        torch._C._set_deterministic_algorithms(wanted == "bitwise", warn_only=False)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = wanted == "fast"


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__}


def _check_same_model(config: RunConfig, start: Manifest) -> None:
    """Steps, batch and learning rate may change when a run is resumed; what the tensors are may not."""
    now = config.numerics()
    for name in ("recipe", config.recipe):
        before = start.config.get(name)
        if before != now.get(name):
            message = f"is {now.get(name)!r}, but {start.name} was trained with {before!r}. Clone the job to change it."
            raise ConfigError([Problem(f"run.{name}", message)])
