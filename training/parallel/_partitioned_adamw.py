"""AdamW whose state is divided over the ranks, each parameter's whole state on one of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.optim import ZeroRedundancyOptimizer

from training.step.optimizer import BETAS, EPSILON, has_decay


class PartitionedAdamW:
    """Uses torch's class to divide and send; state is stored by name, so a checkpoint resumes on any number of ranks.

    (The class's own state_dict must first be gathered on one rank, which then needs the memory that no rank should
    need.)
    """

    def __init__(
        self, parameters: Iterable[tuple[str, nn.Parameter]], group: ProcessGroup, *, weight_decay: float
    ) -> None:
        named = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        self.parameters = list(named.values())
        groups = [
            {"params": [p for p in self.parameters if has_decay(p) == has_weight_decay], "weight_decay": decay}
            for has_weight_decay, decay in ((True, weight_decay), (False, 0.0))
        ]
        self._whole: Any = ZeroRedundancyOptimizer(
            [group for group in groups if group["params"]],
            optimizer_class=torch.optim.AdamW,
            process_group=group,
            betas=BETAS,
            eps=EPSILON,
            fused=True,
            lr=0.0,
        )
        self._local: Any = self._whole.optim
        names = {parameter: name for name, parameter in named.items()}
        self.steps = torch.zeros((), device=self.parameters[0].device)
        self.means: dict[str, Tensor] = {}
        self.squares: dict[str, Tensor] = {}
        for parameter in (p for group in self._local.param_groups for p in group["params"]):
            mean, square = torch.zeros_like(parameter), torch.zeros_like(parameter)
            self.means[names[parameter]], self.squares[names[parameter]] = mean, square
            self._local.state[parameter] = {"step": self.steps.clone(), "exp_avg": mean, "exp_avg_sq": square}

    def step(self, learning_rate: float, grad_scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        for group in (*self._whole.param_groups, *self._local.param_groups):
            group["lr"] = learning_rate
        for state in self._local.state.values():
            state["step"].copy_(self.steps)
        self._local.grad_scale, self._local.found_inf = grad_scale, found_inf
        self._whole.step()
        self.steps += 1 if found_inf is None else 1 - found_inf

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def state(self) -> dict[str, object]:
        """Return this rank's part, by parameter name."""
        return {"steps": self.steps, "means": self.means, "squares": self.squares}
