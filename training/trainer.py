"""The training loop: reads a run's configuration, trains to the end or to a stop, and leaves checkpoints and reports.

After each step, in this order: its report; the end, if all ranks agreed on it meanwhile (a stop request, or numbers
that cannot be trusted); checks of the weights; handling of a save that has ended; profiles; a validation, if due; a
save.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from training.attempt.workspace import Workspace
from training.checkpoint.staging import State
from training.config.run_config import RunConfig
from training.engine import assembling
from training.engine.assembling import Assembly
from training.engine.optimizer_step import OptimizerStep, StepRecord
from training.engine.validating import Validation
from training.guards.guards import Guards
from training.loader import supply
from training.loop import Loop, LoopServices, versions
from training.manifest import Manifest
from training.metrics.measuring import Measuring
from training.metrics.meter import Meter, MeterOptions, StepTimes
from training.metrics.profiling import Profiling
from training.runtime.distributed import StepFlags, World
from training.weights import configured

STEPS_BEFORE_SAVES = 5
"""Steps after which the first save is prepared: not at the start, as people wait for the first step."""


class Trainer(Loop):
    """One rank's run of a whole model, trained step by step on batches of all ranks together."""

    config: RunConfig
    assembly: Assembly
    optimizer_step: OptimizerStep
    meter: Meter
    measuring: Measuring

    def __init__(self, config: RunConfig, workspace: Workspace, world: World, services: LoopServices) -> None:
        self.validation = Validation(config, world)
        super().__init__(config, workspace, world, services)
        self.config = config
        self._prepare_save_at = -1
        self._is_saving = False
        self.guards = Guards(config, workspace, world, self.reporter)
        self.stateful_parts |= {"validation": self.validation, "guards": self.guards}
        self.profiling = Profiling(
            workspace.run_dir,
            workspace.attempt_dir,
            world.rank,
            at=config.profile_at,
            steps=config.profile_steps,
            reporter=self.reporter,
            heartbeat=self.heartbeat,
        )

    def _catch_up(self, start: Manifest | None) -> bool:
        if start is not None and self.validation.is_missing(self.step):
            if self._validate():
                return True
            if self.validation.has_best(self.step):
                self._save()  # the checkpoint that it starts from lacks this loss
        self._profile()
        return False

    # Setting up.

    def _prepare(self, start: Manifest | None) -> None:
        """Prepare data, model and optimizer; then run one pass that is discarded, and only then restore the state."""
        assembling.check(self.config, self.workspace, self.world, start)
        self._phase("data")
        self.assembly = assembling.assemble(
            self.config, self.workspace, self.world, start, heartbeat=self.heartbeat, reporter=self.reporter
        )
        self.base_config = self.config = self.assembly.config
        if self.assembly.base is not None:
            self.stateful_parts["base"] = self.assembly.base
        self.optimizer_step = self.guards.make_optimizer_step(self.assembly)
        self.measuring = Measuring(
            self.config, self.world, self.assembly, self.reporter, slow_rank=lambda: self.guards.slow_rank
        )
        self.meter = Meter(
            self.reporter,
            MeterOptions(
                unit=self.assembly.task.unit,
                units_per_step=self.assembly.units_per_step,
                flush_steps=self.config.flush_steps,
                flush_seconds=self.config.flush_seconds,
            ),
            leads=self.world.leads,
            log=self._log,
            on_steps=self._process_steps,
            device=self.world.device,
            measuring=self.measuring,
        )
        self._phase("compile")
        self.optimizer_step.run_discarded_pass()
        self.assembly.model.exchange.begin()
        if start is not None:
            self._phase("restore")
            self._restore(start)
        if self.config.checkpoint_every:
            self._prepare_save_at = self.step + STEPS_BEFORE_SAVES

    def _restore(self, start: Manifest) -> None:
        self.assembly.restore(lambda state: self.checkpoints.restore(state, start))
        self._recall(start)

    def _report_started(self, start: Manifest | None) -> None:
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
            versions=versions(),
            **task.facts,
        )
        supply.report_prepared(self.reporter, self.assembly.prepared, task, share)
        self._phase("step")
        origin = f"from {start.name}" if start else self._origin()
        ranks = f"{self.world.size} rank{'s' * (self.world.size > 1)} on {self.world.device.type}"
        self._log(f"{self.config.recipe}: {parameters:,} parameters, {ranks}, {origin}, {self.config.steps} steps")

    def _origin(self) -> str:
        weights = configured.weights_path(self.config)
        return f"from the weights in {weights}" if weights else "from scratch"

    # The loop.

    def _run_step(self) -> StepFlags:
        """Do one optimizer step; return the flags exchanged alongside it."""
        began = time.perf_counter()
        self.heartbeat.beat("data", self.step)
        due = self.world.leads and self.cadence.is_due(self.step + 1)
        self.guards.begin(self.step)
        self.agreement.begin(
            stop=self.stop.is_requested, saving=self.checkpoints.is_saving, due=due, trouble=self.guards.has_trouble
        )
        parts = self.assembly.feed.take(self.consumed)
        self.heartbeat.beat("step", self.step)
        self.measuring.begin(alone=not self.profiling.is_recording)
        done = self.optimizer_step(parts, self.step)
        marks, cost = self.measuring.end(self.step + 1)
        self.step += 1
        self.consumed += self.config.global_batch
        computed = time.perf_counter()
        exchange = self.assembly.model.exchange
        if exchange.has_independent_replicas:
            self.heartbeat.beat("exchange", self.step)  # the whole model is exchanged, perhaps over a slow network
        with self.measuring.exchanging(marks):
            exchange.step(self.step, done.guard_decision.skipped, done.guard_decision.frozen)
        sent = exchange.sent_bytes(len(parts))
        if exchange.has_independent_replicas and sent and self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)  # here, as otherwise a later step would seem stuck
        agreed = self.agreement.end()
        ended = time.perf_counter()
        times = StepTimes(ended - began - cost, self.assembly.feed.waited, marks, sent, saving=agreed.saving)
        waited = ended - computed + cost  # the end of a sample waits for the GPU
        self.guards.end(self.step, self.consumed, done.guard_decision, data_seconds=times.data, waited=waited)
        self.meter.record(self.step, done, times)
        return agreed

    def _process_steps(self, steps: Sequence[StepRecord], waited: float) -> None:
        """Process steps whose numbers have been fetched; only now are their durations known, as a GPU is behind."""
        for record in steps:
            self.cadence.note_step(record.seconds, saving=record.saving, exchange=record.exchange)
        self.guards.process(steps, waited)

    def _between_steps(self, agreed: StepFlags) -> bool:
        if agreed.trouble:
            self._end_in_trouble()
        self.guards.check(self.step, self.consumed)
        self._settle()
        self._profile()
        if self.step == self._prepare_save_at and not agreed.saving:
            self.checkpoints.prepare(self.assembly.state())
        if self.validation.is_due(self.step) and self._validate():
            return True
        self._save_if_due(agreed, required=self.validation.has_best(self.step) or self._is_permanent())
        return False

    def _profile(self) -> None:
        self.profiling.between(self.step, continues=self.step < self.config.steps)

    def _settle(self) -> None:
        """Handle a save that has ended, once the durations of the steps alongside it are known."""
        if self.checkpoints.is_saving:
            return
        if self._is_saving:
            self._is_saving = False
            self.meter.flush()
        self.checkpoints.process_ended_save()

    def _validate(self) -> bool:
        """Validate; return True if a stop cut it short."""
        self._process_metrics()
        self._phase("validate")
        means = self.validation.run(self.assembly, self.step, continues=self._continues)
        if means is not None and self.world.leads:
            self.reporter.log(self.step, **{f"validation_{name}": mean for name, mean in means.items()})
            self._log(
                f"step {self.step}  " + "  ".join(f"validation {name} {mean:.4f}" for name, mean in means.items())
            )
        self._phase("step")
        return means is None

    def _continues(self) -> bool:
        self.heartbeat.beat("validate", self.step)
        return not self.agreement.now(stop=self.stop.is_requested).stop

    def _state(self) -> State:
        return self.assembly.state()

    def _layout(self) -> dict[str, Any]:
        return self.assembly.layout(self.config, self.world)

    def _data_identity(self) -> str:
        return self.assembly.prepared.identity

    def _validation_loss(self) -> float | None:
        return self.validation.loss_at(self.step)

    def _forget(self, state: Mapping[str, Any]) -> None:
        self.validation.forget(state)

    def _on_save_begun(self, seconds: float) -> None:
        self._is_saving = True
        self.measuring.record_stall(self.step, seconds)

    def _process_metrics(self) -> None:
        self.meter.flush()
        self.guards.pause()
        if self.agreement.now(trouble=self.guards.has_trouble).trouble:
            self._end_in_trouble()

    def _end_in_trouble(self) -> NoReturn:
        """End the run, as its numbers cannot be trusted; earlier checkpoints stay. Raises NumericsError."""
        self._finish_save()
        self.meter.flush()
        self.guards.stop()

    def _close(self) -> None:
        self.assembly.feed.close()
        self.profiling.close(self.step)
        self._process_metrics()
        self.measuring.report_bottleneck()


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
