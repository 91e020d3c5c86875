"""Watch a run's numbers: decide on the device whether a step is applied, and on the host whether the run continues.

    gradient norm    clipped at max(clip, μ + 4σ), a step above 20 μ skipped, 10 skipped of 50 end the run
    not finite       the step and all after it are skipped, until the host has noticed and examined it
    loss             the run ends if the smoothed loss has left its lowest value for good
    bits             state that ranks share is compared, at intervals
    own time         a rank that keeps the others waiting is reported; the run continues

The device's decisions are fetched with the metrics, some steps later, so no step waits; all ranks learn of them at the
same boundary (training.runtime.distributed.Agreement) and end together, with NumericsError
(docs/explanations/guards.md).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from training.attempt.files import write_json
from training.attempt.workspace import Workspace
from training.config.communication import PLAIN
from training.config.run_config import RunConfig
from training.engine.assembling import Assembly
from training.engine.optimizer_step import OptimizerStep, StepRecord
from training.guards import nonfinite, transient
from training.guards.corruption import Corruption, CorruptionChecks
from training.guards.divergence import Divergence
from training.guards.numerics import NumericsError, Trouble
from training.guards.stragglers import WINDOW, Straggler, Stragglers
from training.metrics.bottleneck import SlowRank
from training.reporting.reporter import AnyReporter
from training.runtime.devices import node_name
from training.runtime.distributed import World, gather
from training.step.clipping import LEVEL_STEPS, MAX_FLOAT, GradientGuard, GuardDecision
from training.step.loss_scale import LossScale
from training.step.own_time import OwnTime

MAX_SKIPS, SKIP_STEPS = 10, 50
DETAILED_RANKS = 16
"""Number of ranks that the dump describes in full; of the others it has the loss only."""
FLUSH_SECONDS = 5.0


class Guards:
    """One rank's guards. Their state is saved in checkpoints."""

    def __init__(self, config: RunConfig, workspace: Workspace, world: World, reporter: AnyReporter) -> None:
        self._config, self._workspace, self._world, self._reporter = config, workspace, world, reporter
        self.scale = LossScale(world.device) if str(config.dtype) == "fp16" else None
        self.gradient = GradientGuard(world.device, clip=config.clip, armed=config.guards, scale=self.scale)
        self.divergence = Divergence(config.warmup_steps)
        self._skips: deque[int] = deque(maxlen=MAX_SKIPS)
        self._level_at = 0
        """The step at which a new level of the norms was established; 0: none yet."""
        self._waiting: list[tuple[int, GuardDecision]] = []
        self._trouble: Trouble | None = None
        self._clean = 0
        self._step = self._consumed = 0
        self._stragglers = Stragglers(world) if config.guards and world.size > 1 else None

    def make_optimizer_step(self, assembly: Assembly) -> OptimizerStep:
        """Return the run's guarded optimizer step; to be called once."""
        self._assembly = assembly
        shape = assembly.model.shape
        # fsdp's hooks run before a parameter's, regardless of its shards: each block has been exchanged by then.
        exchanges_late = assembly.config.parallelism != "fsdp" and all(
            shape[axis] == 1 for axis in ("pp", "shard", "cp", "tp")
        )
        parameters = assembly.optimizer.parameters
        self._own_time = OwnTime(self._world, parameters, exchanges_late=exchanges_late) if self._stragglers else None
        self._update = OptimizerStep(self._config, assembly, self.gradient, self.scale, self._own_time)
        self._checks = CorruptionChecks(self._config, self._world, assembly, self._update)
        return self._update

    @property
    def slow_rank(self) -> SlowRank | None:
        """The rank that the others wait for, if one has been named."""
        slowest = self._stragglers.slowest if self._stragglers is not None else None
        return SlowRank(slowest.rank, slowest.factor, slowest.part) if slowest is not None else None

    @property
    def has_trouble(self) -> bool:
        """Whether this rank has found a reason to end the run."""
        return self._trouble is not None

    # At every step.

    def begin(self, finished: int) -> None:
        """Begin the step that follows `finished` steps."""
        if self._stragglers is not None and self._own_time is not None and finished and finished % WINDOW == 0:
            self._stragglers.begin(self._own_time)

    def end(self, step: int, consumed: int, guarded: GuardDecision, *, data_seconds: float, waited: float) -> None:
        """End the step.

        `waited`: seconds spent waiting for other ranks. The decisions stay on the device until fetched.
        """
        self._step, self._consumed = step, consumed
        self._waiting.append((step, guarded))
        if self._stragglers is None or self._own_time is None:
            return
        self._own_time.note_data(data_seconds)
        began = time.perf_counter()
        stragglers = self._stragglers.end()
        self._own_time.wait(waited + time.perf_counter() - began)
        for straggler in stragglers:
            self._report_straggler(straggler, step)

    def process(self, steps: Sequence[StepRecord], waited: float) -> None:
        """Process the steps since the last flush. `waited`: seconds spent waiting for the device."""
        if self._own_time is not None:
            self._own_time.wait(waited)
            for record in steps:
                self._own_time.note_step(record.seconds)
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        fetched = torch.stack([value for _, guarded in waiting for value in _decisions(guarded)]).tolist()
        for record, start in zip(steps, range(0, len(fetched), 5), strict=True):
            skipped, limit, mean, frozen, learned = fetched[start : start + 5]
            if learned:
                self._note_level(record, mean=mean, report=self._config.guards and limit < MAX_FLOAT)
            self._process_step(record, skipped=bool(skipped), limit=limit, mean=mean, frozen=bool(frozen))

    def _process_step(self, record: StepRecord, *, skipped: bool, limit: float, mean: float, frozen: bool) -> None:
        if self._trouble is not None:
            return
        step, loss, norm, *_ = record
        if frozen or (not math.isfinite(loss) and not skipped):
            what, is_local = f"loss {loss}, gradient norm {norm}", not math.isfinite(loss)
            self._trouble = Trouble("nonfinite", step, what, self._world.rank, is_local)
        elif skipped and math.isfinite(norm):
            self._note_skip(step, norm, limit=limit, mean=mean)
        elif skipped:
            if self._world.leads:
                self._reporter.event("guard.overflow", step=step)  # fp16: the loss scale is halved
        elif self._config.guards and self._world.leads and self.divergence.note(loss):
            divergence = self.divergence
            what = (
                f"the smoothed loss is {divergence.smoothed:.4g}, more than {divergence.margin:.4g} above its lowest, "
                f"{divergence.lowest:.4g}, for many steps"
            )
            self._trouble = Trouble("divergence", step, what, self._world.rank)

    def _note_skip(self, step: int, norm: float, *, limit: float, mean: float) -> None:
        self._skips.append(step)
        if self._world.leads:
            batch = nonfinite.samples(self._assembly, self._consumed_before(step))
            self._reporter.event("guard.skipped", step=step, norm=norm, mean=mean, limit=limit, samples=batch)
        if len(self._skips) == MAX_SKIPS and step - self._skips[0] < SKIP_STEPS:
            what = f"{MAX_SKIPS} of {step - self._skips[0] + 1} steps had a gradient norm above 20 times the usual"
            self._trouble = Trouble("divergence", step, what, self._world.rank)

    def _note_level(self, record: StepRecord, *, mean: float, report: bool) -> None:
        """Handle a new level of the norms: the steps skipped until it was established were no spikes.

        At most once in SKIP_STEPS: a run whose level keeps rising is diverging, and its skipped steps count.
        """
        is_first = not self._level_at or record.step - self._level_at >= SKIP_STEPS
        self._level_at = record.step
        if is_first:
            while self._skips and self._skips[-1] > record.step - LEVEL_STEPS:
                self._skips.pop()
        if self._world.leads and report:
            self._reporter.event("guard.level", step=record.step, norm=record.norm, mean=mean)

    def _report_straggler(self, straggler: Straggler, step: int) -> None:
        if straggler.rank == self._world.rank:  # reported by the rank itself, which knows its node
            self._reporter.event(
                "straggler",
                step=step,
                rank=straggler.rank,
                node=node_name(),
                factor=round(straggler.factor, 2),
                part=straggler.part,
                own_seconds=round(straggler.own_seconds, 6),
                median_seconds=round(straggler.median_seconds, 6),
            )

    # Between steps.

    def check(self, step: int, consumed: int) -> None:
        """Run the corruption checks if they are due; all ranks call. Raises NumericsError."""
        if not self._checks.is_due(step):
            return
        self.pause()
        corruption = self._checks.run(consumed, step)
        if corruption is not None:
            self._stop_corrupt(corruption, step)
        self._clean = step

    def pause(self) -> None:
        """Exclude the time until the next step from the step times."""
        if self._own_time is not None:
            self._own_time.forget()

    # The end.

    def stop(self) -> NoReturn:
        """End the run because some rank has found a reason.

        All ranks call, with their metrics fetched. Raises NumericsError.
        """
        troubles = [trouble for trouble in gather(self._world, self._trouble) if trouble is not None]
        first = min(troubles, key=lambda trouble: (trouble.step, trouble.cause != "nonfinite"))
        if first.cause == "nonfinite":
            self._stop_nonfinite(first, [trouble for trouble in troubles if trouble.step == first.step])
        if self._world.leads:
            self._reporter.event("guard.divergence", step=first.step, what=first.what)
        self._end(NumericsError("divergence", f"at step {first.step:,}, {first.what}"))

    def _stop_nonfinite(self, trouble: Trouble, troubles: Sequence[Trouble]) -> NoReturn:
        """End the run because of a non-finite step.

        `troubles`: what each rank found; the report is about the one at the origin.
        """
        consumed = self._consumed_before(trouble.step)
        diagnoses = self._redo(trouble.step, consumed)
        affected = [found for found in diagnoses if found.where] or diagnoses
        origin = nonfinite.origin(affected, self._assembly.task.model)
        trouble = next((found for found in troubles if found.rank == origin.rank), trouble)
        exchange = self._config.communication
        has_independent_replicas = self._assembly.model.exchange.has_independent_replicas
        if transient.is_conclusive(
            self._config, has_independent_replicas=has_independent_replicas
        ) and transient.did_not_recur(diagnoses):
            self._stop_transient(trouble, troubles, diagnoses)
        sends_it = exchange != PLAIN and not has_independent_replicas
        if sends_it and all(found.is_clean for found in diagnoses):
            trouble = replace(trouble, what=f"{trouble.what}, but finite on every rank before {exchange} exchanged it")
        file = self._dump_path(trouble.step)
        if self._world.leads:
            self._write_dump(file, trouble, consumed, diagnoses, affected)
            self._reporter.event(
                "guard.nonfinite",
                step=trouble.step,
                what=trouble.what,
                where=origin.where,
                rank=origin.rank if origin.where else None,
                ranks=[found.rank for found in diagnoses if found.where][:DETAILED_RANKS],
                samples=nonfinite.samples(self._assembly, consumed),
                file=str(file.relative_to(self._workspace.run_dir)),
            )
        where = f", first in {origin.where} on rank {origin.rank}" if origin.where else ""
        name = f"numerics/{file.name}"
        self._end(NumericsError("nonfinite", f"step {trouble.step:,}: {trouble.what}{where}; {name} tells more"))

    def _redo(self, step: int, consumed: int) -> list[nonfinite.RankDiagnosis]:
        """Repeat the step under observation; return every rank's diagnosis."""
        diagnosis = nonfinite.examine(
            self._assembly, self._update, rank=self._world.rank, consumed=consumed, finished=step - 1
        )
        diagnoses: list[nonfinite.RankDiagnosis] = gather(self._world, diagnosis)
        if self._config.compile and all(found.is_clean for found in diagnoses):
            # It was examined uncompiled, which is different arithmetic.
            diagnosis.loss = nonfinite.repeat_unobserved(
                self._assembly, self._update, consumed=consumed, finished=step - 1
            )
            diagnoses = gather(self._world, diagnosis)
        return diagnoses

    def _stop_transient(
        self, trouble: Trouble, troubles: Sequence[Trouble], diagnoses: Sequence[nonfinite.RankDiagnosis]
    ) -> NoReturn:
        """End the run because the step was finite when repeated.

        The checks may find the faulty rank, else the loss does.
        """
        consumed = self._consumed_before(trouble.step)
        if self._world.leads:
            self._write_dump(self._dump_path(trouble.step), trouble, consumed, diagnoses, diagnoses)
        corruption = transient.judge(troubles, shares=gather(self._world, self._assembly.share.index))
        check = self._checks.run(consumed, trouble.step - 1)
        if check is not None and check.ranks and not corruption.ranks:
            corruption = replace(corruption, ranks=check.ranks[:1])
        self._stop_corrupt(corruption, trouble.step, intact=check is None or check.check != "replica")

    def _dump_path(self, step: int) -> Path:
        return self._workspace.attempt_dir / "numerics" / f"step-{step}.json"

    def _write_dump(
        self,
        file: Path,
        trouble: Trouble,
        consumed: int,
        diagnoses: Sequence[nonfinite.RankDiagnosis],
        affected: Sequence[nonfinite.RankDiagnosis],
    ) -> None:
        content = {
            "step": trouble.step,
            "what": trouble.what,
            "samples": nonfinite.samples(self._assembly, consumed),
            "losses": {str(found.rank): found.loss for found in diagnoses},
            "ranks": [found.to_dict() for found in affected[:DETAILED_RANKS]],
        }
        try:
            file.parent.mkdir(exist_ok=True)
            write_json(file, content, durable=True)
        except OSError as error:  # a full disk must not hide why the run ends
            print(f"{file} can't be written: {error}", flush=True)

    def _stop_corrupt(self, found: Corruption, step: int, *, intact: bool = False) -> NoReturn:
        """End the run. `intact`: as far as is known the weights are right, and so is the newest checkpoint."""
        names = gather(self._world, node_name())
        nodes = sorted({names[rank] for rank in found.ranks or found.among})
        if self._world.leads:
            self._reporter.event(
                "guard.corruption",
                step=step,
                check=found.check,
                ranks=list(found.ranks),
                among=list(found.among)[:DETAILED_RANKS],
                what=found.what,
                clean_step=self._clean,
                # If either of two nodes may be faulty, none is named.
                node=nodes[0] if len(nodes) == 1 else None,
                intact=intact,
            )
        since = f"; the last clean check was at step {self._clean:,}" if self._clean else ""
        self._end(NumericsError("corruption", f"at step {step:,} {found}{since}"))

    def _end(self, error: NumericsError) -> NoReturn:
        """End together once the findings are on disk: the first rank to leave takes the others down."""
        self._reporter.flush(wait=FLUSH_SECONDS)
        gather(self._world, None)
        raise error

    def _consumed_before(self, step: int) -> int:
        """Return how many samples all ranks had consumed when this step began."""
        return self._consumed - (self._step - step + 1) * self._config.global_batch

    # State that checkpoints save.

    def state_dict(self) -> dict[str, Any]:
        state = {
            "gradient": self.gradient.state_dict(),
            "divergence": self.divergence.state_dict(),
            "skips": list(self._skips),
            "level_step": self._level_at,
            "clean_step": self._clean,
        }
        return state if self.scale is None else {**state, "loss_scale": self.scale.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.gradient.load_state_dict(_table(state, "gradient"))
        self.divergence.load_state_dict(_table(state, "divergence"))
        skips, clean, level = state.get("skips"), state.get("clean_step"), state.get("level_step")
        if isinstance(skips, list):
            self._skips.extend(step for step in skips if type(step) is int)
        self._clean = clean if type(clean) is int else 0
        self._level_at = level if type(level) is int else 0
        if self.scale is not None:
            self.scale.load_state_dict(_table(state, "loss_scale"))


def _decisions(guarded: GuardDecision) -> tuple[Tensor, ...]:
    return guarded.skipped, guarded.limit, guarded.mean, guarded.frozen, guarded.learned.float()


def _table(state: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = state.get(name)
    return found if isinstance(found, Mapping) else {}
