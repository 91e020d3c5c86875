"""Watches a run's numbers: decides on the device what a step may do, and on the host whether the run goes on.

    gradient norm    clipped at max(clip, μ + 4σ), a step above 20 μ skipped, 10 of 50 end the run
    not finite       the step and all after it are skipped, until the host has noticed and examined it
    loss             a smoothed loss that has left its lowest for good ends the run
    bits             what ranks hold alike is compared, every so many steps
    own time         a rank that keeps the others waiting is named; the run goes on

What the device decides is read with the metrics, some steps later, so no step waits; all ranks learn of it at the same
boundary (training.runtime.distributed.Agreement) and end together, with NumericsError (docs/guards.md).
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
from training.attempt.place import Place
from training.config.communication import PLAIN
from training.config.run_config import RunConfig
from training.engine.assembling import Assembly
from training.engine.optimizer_step import Known, OptimizerStep
from training.guards import nonfinite, passing
from training.guards.corruption import Corruption, CorruptionChecks
from training.guards.divergence import Divergence
from training.guards.numerics import NumericsError, Trouble
from training.guards.stragglers import WINDOW, Straggler, Stragglers
from training.metrics.bottleneck import Late
from training.reporting.reporter import AnyReporter
from training.runtime.devices import node_name
from training.runtime.distributed import World, gather
from training.step.clipping import LARGEST, LEVEL_STEPS, GradientGuard, Guarded
from training.step.loss_scale import LossScale
from training.step.own_time import OwnTime

MOST_SKIPS, SKIP_STEPS = 10, 50
DETAILED_RANKS = 16
"""The dump tells all of so many ranks; of the others, what they had for a loss."""
WRITTEN_SECONDS = 5.0


class Guards:
    """One rank's guards, part of what a checkpoint remembers."""

    def __init__(self, config: RunConfig, place: Place, world: World, reporter: AnyReporter) -> None:
        self._config, self._place, self._world, self._reporter = config, place, world, reporter
        self.scale = LossScale(world.device) if str(config.dtype) == "fp16" else None
        self.gradient = GradientGuard(world.device, clip=config.clip, armed=config.guards, scale=self.scale)
        self.divergence = Divergence(config.warmup_steps)
        self._skips: deque[int] = deque(maxlen=MOST_SKIPS)
        self._level_at = 0
        """The step with which a new level of the norms was learned; 0: none was."""
        self._waiting: list[tuple[int, Guarded]] = []
        self._trouble: Trouble | None = None
        self._clean = 0
        self._step = self._consumed = 0
        self._stragglers = Stragglers(world) if config.guards and world.size > 1 else None

    def equip(self, assembly: Assembly) -> OptimizerStep:
        """The run's steps, guarded; to be called once."""
        self._assembly = assembly
        shape = assembly.model.shape
        # fsdp's own hooks come before a parameter's, whatever its shards: there each block has been exchanged by then.
        late = assembly.config.parallelism != "fsdp" and all(shape[axis] == 1 for axis in ("pp", "shard", "cp", "tp"))
        parameters = assembly.optimizer.parameters
        self._own_time = OwnTime(self._world, parameters, exchanges_late=late) if self._stragglers else None
        self._update = OptimizerStep(self._config, assembly, self.gradient, self.scale, self._own_time)
        self._checks = CorruptionChecks(self._config, self._world, assembly, self._update)
        return self._update

    @property
    def late(self) -> Late | None:
        """The rank that the others wait for, if one is named."""
        named = self._stragglers.named if self._stragglers is not None else None
        return Late(named.rank, named.factor, named.part) if named is not None else None

    @property
    def troubled(self) -> bool:
        """Whether this rank has found what ends the run."""
        return self._trouble is not None

    # At every step.

    def begin(self, finished: int) -> None:
        """Begins with the step that follows so many finished ones."""
        if self._stragglers is not None and self._own_time is not None and finished and finished % WINDOW == 0:
            self._stragglers.begin(self._own_time)

    def end(self, step: int, consumed: int, guarded: Guarded, *, data_seconds: float, waited: float) -> None:
        """Ends the step; `waited`: seconds for the other ranks. What was decided stays on the device until fetched."""
        self._step, self._consumed = step, consumed
        self._waiting.append((step, guarded))
        if self._stragglers is None or self._own_time is None:
            return
        self._own_time.note(data_seconds)
        began = time.perf_counter()
        found = self._stragglers.end()
        self._own_time.wait(waited + time.perf_counter() - began)
        for straggler in found:
            self._tell_straggler(straggler, step)

    def look(self, steps: Sequence[Known], waited: float) -> None:
        """Looks at the steps since the last flush; `waited`: seconds that the device was waited for."""
        if self._own_time is not None:
            self._own_time.wait(waited)
            for known in steps:
                self._own_time.took(known.seconds)
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        fetched = torch.stack([value for _, guarded in waiting for value in _decided(guarded)]).tolist()
        for known, start in zip(steps, range(0, len(fetched), 5), strict=True):
            skipped, limit, mean, frozen, learned = fetched[start : start + 5]
            if learned:
                self._note_level(known, mean=mean, tell=self._config.guards and limit < LARGEST)
            self._look_at(known, skipped=bool(skipped), limit=limit, mean=mean, frozen=bool(frozen))

    def _look_at(self, known: Known, *, skipped: bool, limit: float, mean: float, frozen: bool) -> None:
        if self._trouble is not None:
            return
        step, loss, norm, *_ = known
        if frozen or (not math.isfinite(loss) and not skipped):
            what, is_own = f"loss {loss}, gradient norm {norm}", not math.isfinite(loss)
            self._trouble = Trouble("nonfinite", step, what, self._world.rank, is_own)
        elif skipped and math.isfinite(norm):
            self._note_skip(step, norm, limit=limit, mean=mean)
        elif skipped:
            if self._world.leads:
                self._reporter.event("guard.overflow", step=step)  # fp16: the loss scale is halved
        elif self._config.guards and self._world.leads and self.divergence.note(loss):
            found = self.divergence
            what = (
                f"the smoothed loss is {found.smoothed:.4g}, more than {found.margin:.4g} above its lowest, "
                f"{found.lowest:.4g}, for many steps"
            )
            self._trouble = Trouble("divergence", step, what, self._world.rank)

    def _note_skip(self, step: int, norm: float, *, limit: float, mean: float) -> None:
        self._skips.append(step)
        if self._world.leads:
            batch = nonfinite.samples(self._assembly, self._consumed_before(step))
            self._reporter.event("guard.skipped", step=step, norm=norm, mean=mean, limit=limit, samples=batch)
        if len(self._skips) == MOST_SKIPS and step - self._skips[0] < SKIP_STEPS:
            what = f"{MOST_SKIPS} of {step - self._skips[0] + 1} steps had a gradient norm above 20 times the usual"
            self._trouble = Trouble("divergence", step, what, self._world.rank)

    def _note_level(self, known: Known, *, mean: float, tell: bool) -> None:
        """The norms' level has changed: the steps that were skipped until that was sure were no spikes.

        Once in SKIP_STEPS: one level after another is a run that runs away, and its skipped steps count.
        """
        is_first = not self._level_at or known.step - self._level_at >= SKIP_STEPS
        self._level_at = known.step
        if is_first:
            while self._skips and self._skips[-1] > known.step - LEVEL_STEPS:
                self._skips.pop()
        if self._world.leads and tell:
            self._reporter.event("guard.level", step=known.step, norm=known.norm, mean=mean)

    def _tell_straggler(self, straggler: Straggler, step: int) -> None:
        if straggler.rank == self._world.rank:  # its own stream knows its node
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
        """The corruption checks, where they are due; all ranks call. Raises NumericsError."""
        if not self._checks.is_due(step):
            return
        self.pause()
        found = self._checks.run(consumed, step)
        if found is not None:
            self._stop_corrupt(found, step)
        self._clean = step

    def pause(self) -> None:
        """What follows until the next step is no part of a step."""
        if self._own_time is not None:
            self._own_time.forget()

    # The end.

    def stop(self) -> NoReturn:
        """Some rank has found what ends the run, and all know; all call, with their metrics fetched."""
        found = [trouble for trouble in gather(self._world, self._trouble) if trouble is not None]
        first = min(found, key=lambda trouble: (trouble.step, trouble.cause != "nonfinite"))
        if first.cause == "nonfinite":
            self._stop_nonfinite(first, [trouble for trouble in found if trouble.step == first.step])
        if self._world.leads:
            self._reporter.event("guard.divergence", step=first.step, what=first.what)
        self._end(NumericsError("divergence", f"at step {first.step:,}, {first.what}"))

    def _stop_nonfinite(self, trouble: Trouble, troubles: Sequence[Trouble]) -> NoReturn:
        """`troubles`: what each rank has to say of that step; the one is told where it began."""
        consumed = self._consumed_before(trouble.step)
        everybody = self._redo(trouble.step, consumed)
        seen = [found for found in everybody if found.where] or everybody
        origin = nonfinite.origin(seen, self._assembly.task.model)
        trouble = next((found for found in troubles if found.rank == origin.rank), trouble)
        exchange = self._config.communication
        apart = self._assembly.model.exchange.is_apart
        if passing.may_tell(self._config, apart=apart) and passing.did_not_recur(everybody):
            self._stop_passing(trouble, troubles, everybody)
        sends_it = exchange != PLAIN and not apart
        if sends_it and all(found.is_clean for found in everybody):
            trouble = replace(trouble, what=f"{trouble.what}, but finite on every rank before {exchange} exchanged it")
        file = self._file_of(trouble.step)
        if self._world.leads:
            self._write(file, trouble, consumed, everybody, seen)
            self._reporter.event(
                "guard.nonfinite",
                step=trouble.step,
                what=trouble.what,
                where=origin.where,
                rank=origin.rank if origin.where else None,
                ranks=[found.rank for found in everybody if found.where][:DETAILED_RANKS],
                samples=nonfinite.samples(self._assembly, consumed),
                file=str(file.relative_to(self._place.run_dir)),
            )
        where = f", first in {origin.where} on rank {origin.rank}" if origin.where else ""
        name = f"numerics/{file.name}"
        self._end(NumericsError("nonfinite", f"step {trouble.step:,}: {trouble.what}{where}; {name} tells more"))

    def _redo(self, step: int, consumed: int) -> list[nonfinite.Seen]:
        """What every rank sees in it."""
        mine = nonfinite.examine(
            self._assembly, self._update, rank=self._world.rank, consumed=consumed, finished=step - 1
        )
        everybody: list[nonfinite.Seen] = gather(self._world, mine)
        if self._config.compile and all(found.is_clean for found in everybody):
            # It was looked at uncompiled, which is other arithmetic.
            mine.loss = nonfinite.once_more(self._assembly, self._update, consumed=consumed, finished=step - 1)
            everybody = gather(self._world, mine)
        return everybody

    def _stop_passing(
        self, trouble: Trouble, troubles: Sequence[Trouble], everybody: Sequence[nonfinite.Seen]
    ) -> NoReturn:
        """It does not come again. The checks may know whose hardware it is; else who had it may."""
        consumed = self._consumed_before(trouble.step)
        if self._world.leads:
            self._write(self._file_of(trouble.step), trouble, consumed, everybody, everybody)
        found = passing.judge(troubles, shares=gather(self._world, self._assembly.share.index))
        checked = self._checks.run(consumed, trouble.step - 1)
        if checked is not None and checked.ranks and not found.ranks:
            found = replace(found, ranks=checked.ranks[:1])
        self._stop_corrupt(found, trouble.step, intact=checked is None or checked.check != "replica")

    def _file_of(self, step: int) -> Path:
        return self._place.attempt_dir / "numerics" / f"step-{step}.json"

    def _write(
        self,
        file: Path,
        trouble: Trouble,
        consumed: int,
        everybody: Sequence[nonfinite.Seen],
        seen: Sequence[nonfinite.Seen],
    ) -> None:
        about = {
            "step": trouble.step,
            "what": trouble.what,
            "samples": nonfinite.samples(self._assembly, consumed),
            "losses": {str(found.rank): found.loss for found in everybody},
            "ranks": [found.told() for found in seen[:DETAILED_RANKS]],
        }
        try:
            file.parent.mkdir(exist_ok=True)
            write_json(file, about, durable=True)
        except OSError as error:  # a full disk must not hide why the run ends
            print(f"{file} can't be written: {error}", flush=True)

    def _stop_corrupt(self, found: Corruption, step: int, *, intact: bool = False) -> NoReturn:
        """`intact`: the weights are right for all that is known, so the newest checkpoint is."""
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
                # Of two nodes that nobody can tell apart, neither is named.
                node=nodes[0] if len(nodes) == 1 else None,
                intact=intact,
            )
        since = f"; the last clean check was at step {self._clean:,}" if self._clean else ""
        self._end(NumericsError("corruption", f"at step {step:,} {found}{since}"))

    def _end(self, error: NumericsError) -> NoReturn:
        """Nobody leaves before what was found is on disk: the first to leave takes the others down."""
        self._reporter.flush(wait=WRITTEN_SECONDS)
        gather(self._world, None)
        raise error

    def _consumed_before(self, step: int) -> int:
        """Samples that all ranks had consumed when this step began."""
        return self._consumed - (self._step - step + 1) * self._config.global_batch

    # What a checkpoint remembers.

    def remember(self) -> dict[str, Any]:
        told = {
            "gradient": self.gradient.remember(),
            "divergence": self.divergence.remember(),
            "skips": list(self._skips),
            "level_step": self._level_at,
            "clean_step": self._clean,
        }
        return told if self.scale is None else {**told, "loss_scale": self.scale.remember()}

    def recall(self, told: Mapping[str, Any]) -> None:
        self.gradient.recall(_table(told, "gradient"))
        self.divergence.recall(_table(told, "divergence"))
        skips, clean, level = told.get("skips"), told.get("clean_step"), told.get("level_step")
        if isinstance(skips, list):
            self._skips.extend(step for step in skips if type(step) is int)
        self._clean = clean if type(clean) is int else 0
        self._level_at = level if type(level) is int else 0
        if self.scale is not None:
            self.scale.recall(_table(told, "loss_scale"))


def _decided(guarded: Guarded) -> tuple[Tensor, ...]:
    return guarded.skipped, guarded.limit, guarded.mean, guarded.frozen, guarded.learned.float()


def _table(told: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = told.get(name)
    return found if isinstance(found, Mapping) else {}
