"""The training loop: reads a run's configuration, trains to the end or to a stop, and leaves checkpoints and reports.

After each step come in this order: its report; the end, if all agreed on it meanwhile (a stop was asked for, or some
rank found numbers that can't be trusted); the checks of weights; a save that has ended; profiles; a validation that is
due; a save. Everything that decides the numbers is a function of the configuration and the step, or lies in the
checkpoint; so a run that was killed and resumed continues with the very same losses (protocols.md §4).
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import nn

from training.attempt.heartbeat import Heartbeat, NullHeartbeat
from training.attempt.lineage import check_fence
from training.attempt.place import Place
from training.attempt.stopping import Stopped, StopRequest
from training.checkpoint.cadence import Cadence, mtbf, nodes_here
from training.checkpoint.events import tell_committed
from training.checkpoint.pruning import Keep
from training.checkpoint.remembering import Remembers, recall, remember
from training.checkpoint.saving import Checkpoints, load_start
from training.checkpoint.writing import Facts
from training.config.run_config import RunConfig
from training.engine import assembling
from training.engine.assembling import Assembly
from training.engine.optimizer_step import Known, OptimizerStep
from training.engine.validating import Validation
from training.guards.guards import Guards
from training.loader import supply
from training.manifest import CheckpointError, Manifest
from training.metrics.measuring import Measuring
from training.metrics.meter import Meter, StepTimes
from training.metrics.profiling import Profiling
from training.reporting.reporter import AnyReporter
from training.runtime.distributed import Agreed, Agreement, World
from training.weights import named

STEPS_BEFORE_SAVES = 5
"""Steps after which what the first save needs is made ready: not at the start, whose first step others wait for."""


class Trainer:
    """One rank's run."""

    assembly: Assembly
    optimizer_step: OptimizerStep
    meter: Meter
    measuring: Measuring

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
        """Finished so far."""
        self.consumed = 0
        """Samples, in all finished steps."""
        self._prepares_at = -1
        self._is_saving = False
        self.validation = Validation(config, world)
        self.cadence = Cadence(
            config.checkpoint_every,
            mtbf(config.mtbf_hours, mtbf_hours, nodes_here()),
            keep_every=config.keep_every,
        )
        self.guards = Guards(config, place, world, reporter)
        self.remembers: dict[str, Remembers] = {
            "cadence": self.cadence,
            "validation": self.validation,
            "guards": self.guards,
        }
        """What goes on from plain values in a checkpoint, by the name under which they lie there."""
        self.checkpoints = Checkpoints(
            place.job_dir,
            place.attempt_dir,
            world,
            generation=place.generation,
            keep=Keep(last=config.keep_checkpoints, every=config.keep_every, best=config.keep_best),
            cadence=self.cadence,
            reporter=reporter,
            is_hurried=lambda: stop.asked,
            forget=self.validation.forget,
        )
        self.profiling = Profiling(
            place.run_dir,
            place.attempt_dir,
            world.rank,
            at=config.profile_at,
            steps=config.profile_steps,
            reporter=reporter,
            heartbeat=heartbeat,
        )

    def run(self) -> bool:
        """Trains; True if to the end, False if it was asked to stop and left a checkpoint."""
        check_fence(self.place.job_dir, self.place.generation)
        self.heartbeat.beat("restore")  # to look through checkpoints, and to remove halves, may outlast "init"
        start = load_start(self.checkpoints, self.world, self.place.resume)
        self.checkpoints.start_from(start)
        self._prepare(start)
        self._begin(start)
        stopping = self.agreement.now(stop=self.stop.asked).stop
        if not stopping and start is not None and self.validation.is_owed(self.step):
            stopping = self._validate()
            if self.validation.has_best(self.step):
                self._save()  # the one that it starts from does not tell this loss
        if not stopping:
            self._profile()
        while not stopping and self.step < self.config.steps:
            agreed = self._one_step()
            stopping = agreed.stop or self._between_steps(agreed)
        return self._finish(stopping)

    # Setting up.

    def _prepare(self, start: Manifest | None) -> None:
        """Data, model, optimizer; then one pass that is thrown away, and only then the state."""
        assembling.check(self.config, self.place, self.world, start)
        self._phase("data")
        self.assembly = assembling.assemble(
            self.config, self.place, self.world, start, heartbeat=self.heartbeat, reporter=self.reporter
        )
        self.config = self.assembly.config
        # Once: what decides the numbers is told by files of choices, which an upgrade may replace under a run.
        self._config_hash, self._numerics = self.config.hash(), self.config.numerics()
        if self.assembly.base is not None:
            self.remembers["base"] = self.assembly.base
        self.optimizer_step = self.guards.equip(self.assembly)
        self.measuring = Measuring(self.config, self.world, self.assembly, self.reporter, late=lambda: self.guards.late)
        self.meter = Meter(
            self.reporter,
            leads=self.world.leads,
            unit=self.assembly.task.unit,
            units_per_step=self.assembly.units_per_step,
            flush_steps=self.config.flush_steps,
            flush_seconds=self.config.flush_seconds,
            say=self._say,
            know=self._know,
            device=self.world.device,
            measuring=self.measuring,
        )
        self._phase("compile")
        self.optimizer_step.discard_one()
        self.assembly.model.exchange.begin()
        if start is not None:
            self._phase("restore")
            self._restore(start)
        if self.config.checkpoint_every:
            self._prepares_at = self.step + STEPS_BEFORE_SAVES

    def _restore(self, start: Manifest) -> None:
        self.assembly.restore(lambda state: self.checkpoints.restore(state, start))
        self.step, self.consumed = start.step, start.consumed_samples
        recall(self.remembers, start)

    def _begin(self, start: Manifest | None) -> None:
        if not self.world.leads:
            return
        if start is not None:
            tell_committed(self.reporter, start)  # perhaps it died between commit and report; the portal takes it once
        task, share = self.assembly.task, self.assembly.share
        parameters = task.dims.parameters if task.dims else _count(task.model)
        self.reporter.event(
            "run.started",
            recipe=self.config.recipe,
            parallelism=self.config.parallelism,
            mesh=dict(self.assembly.model.shape),
            steps=self.config.steps,
            start_step=self.step,
            world_size=self.world.size,
            device=self.world.device.type,
            parameters=parameters,
            tokens_per_step=self.assembly.units_per_step,
            unit=task.unit,
            micro_batch=share.micro_batch,
            resumed_from=start.name if start else None,
            versions=_versions(),
            **task.facts,
        )
        supply.tell_prepared(self.reporter, self.assembly.prepared, task, share)
        self._phase("step")
        came = f"from {start.name}" if start else self._origin()
        ranks = f"{self.world.size} rank{'s' * (self.world.size > 1)} on {self.world.device.type}"
        self._say(f"{self.config.recipe}: {parameters:,} parameters, {ranks}, {came}, {self.config.steps} steps")

    def _origin(self) -> str:
        weights = named.named(self.config)
        return f"from the weights in {weights}" if weights else "afresh"

    # The loop.

    def _one_step(self) -> Agreed:
        """One optimizer step, and what the ranks agreed on beside it."""
        began = time.perf_counter()
        self.heartbeat.beat("data", self.step)
        due = self.world.leads and self.cadence.due(self.step + 1)
        self.guards.begin(self.step)
        self.agreement.begin(stop=self.stop.asked, saving=self.checkpoints.busy, due=due, trouble=self.guards.troubled)
        parts = self.assembly.feed.take(self.consumed)
        self.heartbeat.beat("step", self.step)
        self.measuring.begin(alone=not self.profiling.is_on)
        done = self.optimizer_step(parts, self.step)
        marks, cost = self.measuring.end(self.step + 1)
        self.step += 1
        self.consumed += self.config.global_batch
        computed = time.perf_counter()
        exchange = self.assembly.model.exchange
        if exchange.is_apart:
            self.heartbeat.beat("exchange", self.step)  # of the whole model, and perhaps over a slow network
        with self.measuring.exchanging(marks):
            exchange.step(self.step, done.guarded.skipped, done.guarded.frozen)
        sent = exchange.communicated(len(parts))
        if exchange.is_apart and sent and self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)  # here: else a step after it would seem stuck
        agreed = self.agreement.end()
        ended = time.perf_counter()
        times = StepTimes(ended - began - cost, self.assembly.feed.waited, marks, sent, saving=agreed.saving)
        waited = ended - computed + cost  # a sample's end waits for the GPU
        self.guards.end(self.step, self.consumed, done.guarded, data_seconds=times.data, waited=waited)
        self.meter.record(self.step, done, times)
        return agreed

    def _know(self, steps: Sequence[Known], waited: float) -> None:
        """Steps whose numbers have been fetched; only now is it known how long they took, as a GPU is behind."""
        for known in steps:
            self.cadence.note_step(known.seconds, saving=known.saving, exchange=known.exchange)
        self.guards.look(steps, waited)

    def _between_steps(self, agreed: Agreed) -> bool:
        """What is due at this boundary; True if a validation was cut short because a rank was asked to stop."""
        if agreed.trouble:
            self._end_in_trouble()
        self.guards.check(self.step, self.consumed)
        self._settle()
        self._profile()
        if self.step == self._prepares_at and not agreed.saving:
            self.checkpoints.prepare(self.assembly.state())
        last = self.step == self.config.steps
        if self.validation.is_due(self.step) and self._validate():
            return True
        every = self.config.keep_every
        is_promised = self.validation.has_best(self.step) or (every and self.step % every == 0)
        if is_promised and not last:
            self._save()
        elif agreed.due and not last:
            if agreed.saving:
                self.checkpoints.skip(self.step)
            else:
                self._save()
        return False

    def _profile(self) -> None:
        self.profiling.between(self.step, goes_on=self.step < self.config.steps)

    def _settle(self) -> None:
        """Takes note of a save that has ended, once it is known how long the steps beside it took."""
        if self.checkpoints.busy:
            return
        if self._is_saving:
            self._is_saving = False
            self.meter.flush()
        self.checkpoints.settle()

    def _validate(self) -> bool:
        """True if cut short by a stop."""
        self._look()
        self._phase("validate")
        means = self.validation.run(self.assembly, self.step, goes_on=self._goes_on)
        if means is not None and self.world.leads:
            self.reporter.log(self.step, **{f"validation_{name}": mean for name, mean in means.items()})
            self._say(
                f"step {self.step}  " + "  ".join(f"validation {name} {mean:.4f}" for name, mean in means.items())
            )
        self._phase("step")
        return means is None

    def _goes_on(self) -> bool:
        self.heartbeat.beat("validate", self.step)
        return not self.agreement.now(stop=self.stop.asked).stop

    def _save(self) -> None:
        """Training stands still for it, and first for the one before, where that is still being written."""
        self._look()
        began = time.perf_counter()
        self._finish_flight()
        self.heartbeat.beat("save", self.step)
        facts = Facts(
            step=self.step,
            consumed_samples=self.consumed,
            layout=self.assembly.layout(self.config, self.world),
            config_hash=self._config_hash,
            config=self._numerics,
            data=self.assembly.prepared.identity,
            state={"validation_loss": self.validation.loss_at(self.step), **remember(self.remembers)},
            versions=_versions(),
        )
        self.checkpoints.save(self.assembly.state(), facts)
        self._is_saving = True
        self.measuring.stalled(self.step, time.perf_counter() - began)
        self.heartbeat.beat("step", self.step)

    def _look(self) -> None:
        """Looks at the metrics so far, before what they led to is relied on."""
        self.meter.flush()
        self.guards.pause()
        if self.agreement.now(trouble=self.guards.troubled).trouble:
            self._end_in_trouble()

    def _end_in_trouble(self) -> NoReturn:
        """The numbers can't be trusted from here on; what was saved before stays. Raises NumericsError."""
        self._finish_flight()
        self.meter.flush()
        self.guards.stop()

    def _finish_flight(self) -> None:
        """Waits for a save that is being written, which may take longer than a step is allowed to."""
        self.heartbeat.beat("save", self.step)
        self.checkpoints.finish_flight()
        self.heartbeat.beat("step", self.step)

    # The end.

    def _finish(self, stopping: bool) -> bool:
        """The last checkpoint, committed before anybody leaves."""
        self.assembly.feed.close()
        self.profiling.close(self.step)
        self._look()
        self.measuring.tell()
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
        try:
            return self.checkpoints.wait()
        except CheckpointError:  # the state is still at hand
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


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": torch.__version__}
