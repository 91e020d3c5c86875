"""AdamW (Loshchilov & Hutter, 2019, arXiv 1711.05101) on torch's fused kernel, with its state by parameter name.

torch.optim's class gives exactly the same bits (a test compares them), but its first step imports torch.compile's
machinery, which takes as long as importing torch. And state by name can be saved in a checkpoint as it is, on any
layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

BETAS = (0.9, 0.95)
EPSILON = 1e-8


class Optimizer(Protocol):
    """The interface of an optimizer for the training loop."""

    parameters: list[nn.Parameter]

    def step(self, learning_rate: float, grad_scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        """Perform one step from the gradients divided by `grad_scale`; none if `found_inf` is 1 (float32 scalars)."""

    def zero_grad(self) -> None: ...

    def state(self) -> dict[str, object]:
        """Return the tensors themselves by name: to save, or to read a checkpoint into."""


def has_decay(parameter: Tensor) -> bool:
    """Return whether weight decay applies: not to gains and biases."""
    return parameter.ndim >= 2


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, without copying: AdamW works elementwise on any layout."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


class AdamW:
    """AdamW whose state is allocated at once, so that a checkpoint can be read into it."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], *, weight_decay: float) -> None:
        named = {name: parameter for name, parameter in parameters if parameter.requires_grad}
        self.parameters = list(named.values())
        self.steps = torch.zeros((), device=self.parameters[0].device)
        """Number of optimizer steps, a float32 scalar as the kernel requires."""
        self.means = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
        self.squares = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
        self._groups = [
            _Group([name for name, parameter in named.items() if has_decay(parameter) == wanted], named, self, decay)
            for wanted, decay in ((True, weight_decay), (False, 0.0))
        ]

    def step(self, learning_rate: float, grad_scale: Tensor | None = None, found_inf: Tensor | None = None) -> None:
        """Perform one step from the gradients in the parameters."""
        self.steps += 1
        if found_inf is not None:
            self.steps -= found_inf
        with torch.no_grad():
            for group in self._groups:
                group.step(self.steps, learning_rate, grad_scale, found_inf)

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def state(self) -> dict[str, object]:
        return {"steps": self.steps, "means": self.means, "squares": self.squares}


class _Group:
    """Parameters with the same weight decay, as lists for the kernel."""

    def __init__(self, names: list[str], named: dict[str, nn.Parameter], owner: AdamW, decay: float) -> None:
        self._parameters = [named[name] for name in names]
        self._means = [local(owner.means[name]) for name in names]
        self._squares = [local(owner.squares[name]) for name in names]
        self._decay = decay

    def step(self, steps: Tensor, learning_rate: float, grad_scale: Tensor | None, found_inf: Tensor | None) -> None:
        if not self._parameters:
            return
        torch._fused_adamw_(
            [local(parameter) for parameter in self._parameters],
            gradients_of(self._parameters),
            self._means,
            self._squares,
            [],
            [steps] * len(self._parameters),
            lr=learning_rate,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=self._decay,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
            grad_scale=grad_scale,
            found_inf=found_inf,
        )


def gradients_of(parameters: Sequence[nn.Parameter]) -> list[Tensor]:
    """Return this rank's part of each gradient. Raises RuntimeError if a parameter has none."""
    gradients = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if len(gradients) != len(parameters):
        raise RuntimeError("a parameter has no gradient, as the loss does not depend on it")
    return gradients
