"""The validation of a run: means over the same batches each time, and the lowest losses so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from training.config.asked import Asked
from training.config.run_config import RunConfig
from training.engine.assembling import Assembly
from training.engine.best import BestLosses
from training.loader.order import fixed_batch
from training.runtime.distributed import World, broadcast, sum_over_ranks


class Validations:
    """When they are due, and what they have found. A stop may cut one short; then the next start does it first."""

    def __init__(self, asked: Asked, world: World) -> None:
        self._asked, self._world = asked, world
        self._best = BestLosses(asked.keep_best)
        self._step: int | None = None
        self._loss: float | None = None

    def is_due(self, step: int) -> bool:
        every = self._asked.validate_every
        return bool(every) and (step == self._asked.length or step % every == 0)

    def is_owed(self, step: int) -> bool:
        """Whether the run was stopped at a step whose validation was due and not finished."""
        return self.is_due(step) and self._step != step

    def has_best(self, step: int) -> bool:
        """Whether the validation at this step found one of the lowest losses; asked once a step, by all ranks.

        As rank 0 has it: a rank may learn a step later than another that a save has failed.
        """
        if not self._asked.keep_best or self._step != step or self._loss is None:
            return False
        return bool(broadcast(self._world, self._best.enters(self._loss)))

    def forget(self, state: Mapping[str, Any]) -> None:
        """A save came to nothing; `state` is what it was to remember."""
        if (loss := state.get("validation_loss")) is not None:
            self._best.forget(loss)

    def loss_at(self, step: int) -> float | None:
        return self._loss if self._step == step else None

    def found(self, step: int, means: dict[str, float]) -> dict[str, float]:
        """Takes note of what one has found."""
        self._step, self._loss = step, means["loss"]
        return means

    def remember(self) -> dict[str, Any]:
        return {"step": self._step, "loss": self._loss, "best": self._best.remember()}

    def recall(self, told: Mapping[str, Any]) -> None:
        self._step, self._loss = told.get("step"), told.get("loss")
        self._best.recall(told.get("best") or {})


class Validation(Validations):
    """The trainer's: means over the same batches each time."""

    def __init__(self, config: RunConfig, world: World) -> None:
        super().__init__(config, world)
        self._config = config

    def run(self, assembly: Assembly, step: int, *, goes_on: Callable[[], bool]) -> dict[str, float] | None:
        """Means by name over all ranks; None if `goes_on`, which is asked after every batch, said no."""
        samples, share, model = assembly.task.samples["validation"], assembly.share, assembly.model
        sums: dict[str, torch.Tensor] = {}
        seen = 0
        model.train(False)
        try:
            with torch.no_grad():
                batches = min(self._config.validation_batches, -(-samples // share.global_batch))
                for batch in range(batches):
                    for ids in fixed_batch(batch, of=batches, samples=samples, share=share):
                        seen += len(ids)
                        for name, mean in model.score(assembly.feed.look_up("validation", ids).batch).items():
                            sums[name] = sums.get(name, torch.zeros(())) + mean.double() * len(ids)
                    if not goes_on():
                        return None
        finally:
            model.train()
        return self.found(step, self._means(sums, seen))

    def _means(self, sums: Mapping[str, torch.Tensor], seen: int) -> dict[str, float]:
        names = sorted(sums)
        flat = torch.tensor([*(sums[name] for name in names), seen], dtype=torch.float64)
        *totals, count = sum_over_ranks(self._world, flat).tolist()
        return {name: total / count for name, total in zip(names, totals, strict=True)}
