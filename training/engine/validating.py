"""Validate a run: means over the same batches each time, and the lowest losses so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from training.config.base import BaseRunConfig
from training.config.run_config import RunConfig
from training.engine.assembling import Assembly
from training.engine.best import BestLosses
from training.loader.order import fixed_batch
from training.runtime.distributed import World, broadcast, sum_over_ranks


class ValidationSchedule:
    """Decides when validations are due, and records their results.

    A stop may cut one short; the next start then repeats it.
    """

    def __init__(self, config: BaseRunConfig, world: World) -> None:
        self._base_config, self._world = config, world
        self._best = BestLosses(config.keep_best)
        self._step: int | None = None
        self._loss: float | None = None

    def is_due(self, step: int) -> bool:
        interval = self._base_config.validate_every
        return bool(interval) and (step == self._base_config.length or step % interval == 0)

    def is_missing(self, step: int) -> bool:
        """Return whether the run was stopped at this step before its validation was complete."""
        return self.is_due(step) and self._step != step

    def has_best(self, step: int) -> bool:
        """Return whether the validation at this step was one of the best; called once per step, by all ranks.

        Rank 0 decides, as ranks may learn of a failed save at different steps.
        """
        if not self._base_config.keep_best or self._step != step or self._loss is None:
            return False
        return bool(broadcast(self._world, self._best.add(self._loss)))

    def forget(self, state: Mapping[str, Any]) -> None:
        """Forget the loss of a save that failed; `state` is what that save would have stored."""
        if (loss := state.get("validation_loss")) is not None:
            self._best.forget(loss)

    def loss_at(self, step: int) -> float | None:
        return self._loss if self._step == step else None

    def record(self, step: int, means: dict[str, float]) -> dict[str, float]:
        """Record the result of a validation, and return it."""
        self._step, self._loss = step, means["loss"]
        return means

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "loss": self._loss, "best": self._best.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._step, self._loss = state.get("step"), state.get("loss")
        self._best.load_state_dict(state.get("best") or {})


class Validation(ValidationSchedule):
    """The trainer's validation: means over the same batches each time."""

    def __init__(self, config: RunConfig, world: World) -> None:
        super().__init__(config, world)
        self._config = config

    def run(self, assembly: Assembly, step: int, *, continues: Callable[[], bool]) -> dict[str, float] | None:
        """Return means by name over all ranks; None if `continues`, called after every batch, returned False."""
        samples, share, model = assembly.task.samples["validation"], assembly.share, assembly.model
        sums: dict[str, torch.Tensor] = {}
        count = 0
        model.train(False)
        try:
            with torch.no_grad():
                batches = min(self._config.validation_batches, -(-samples // share.global_batch))
                for batch in range(batches):
                    for ids in fixed_batch(batch, batches=batches, samples=samples, share=share):
                        count += len(ids)
                        for name, mean in model.score(assembly.feed.load("validation", ids).batch).items():
                            sums[name] = sums.get(name, torch.zeros(())) + mean.double() * len(ids)
                    if not continues():
                        return None
        finally:
            model.train()
        return self.record(step, self._means(sums, count))

    def _means(self, sums: Mapping[str, torch.Tensor], samples: int) -> dict[str, float]:
        names = sorted(sums)
        flat = torch.tensor([*(sums[name] for name in names), samples], dtype=torch.float64)
        *totals, count = sum_over_ranks(self._world, flat).tolist()
        return {name: total / count for name, total in zip(names, totals, strict=True)}
