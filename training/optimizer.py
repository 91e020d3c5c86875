"""AdamW (Loshchilov & Hutter, 2019, arXiv 1711.05101) on torch's fused kernel, with its state by parameter name.

torch.optim's class gives bit for bit the same numbers (a test compares them), but its first step imports
torch.compile's machinery, which takes as long as importing torch. And state by name goes into a checkpoint as it is, on
any layout.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.95)
EPSILON = 1e-8


class AdamW:
    """State is allocated at once, so that a checkpoint can be read into it."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], *, weight_decay: float) -> None:
        named = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        self.parameters = list(named.values())
        self.steps = torch.zeros((), device=self.parameters[0].device)
        """Optimizer steps taken, a float32 scalar as the kernel wants it."""
        self.means = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
        self.squares = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
        # Gains and biases are not decayed.
        self._groups = [
            _Group([name for name, parameter in named.items() if (parameter.ndim >= 2) == decayed], named, self, decay)
            for decayed, decay in ((True, weight_decay), (False, 0.0))
        ]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """One step from the gradients that the parameters hold."""
        self.steps += 1
        for group in self._groups:
            group.step(self.steps, learning_rate)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def state(self) -> dict[str, object]:
        """The very tensors, by name: to save, or to read a checkpoint into."""
        return {"steps": self.steps, "means": self.means, "squares": self.squares}


class _Group:
    """Parameters of one weight decay, as the lists that the kernel takes."""

    def __init__(self, names: list[str], named: dict[str, nn.Parameter], owner: AdamW, decay: float) -> None:
        self._parameters: list[Tensor] = [named[name] for name in names]
        self._means = [owner.means[name] for name in names]
        self._squares = [owner.squares[name] for name in names]
        self._decay = decay

    def step(self, steps: Tensor, learning_rate: float) -> None:
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if len(gradients) != len(self._parameters):
            raise RuntimeError("a parameter took no part in the loss, so it has no gradient")
        if not gradients:
            return
        torch._fused_adamw_(
            self._parameters,
            gradients,
            self._means,
            self._squares,
            [],
            [steps] * len(gradients),
            lr=learning_rate,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=self._decay,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
        )
