"""Compute the terms of FEDTAIL's loss for one batch of one client, as functions of its weights (algorithms.fedtail)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn import functional

from training.federated.client import Client, ForwardPass
from training.federated.differentiation import grad, jacrev, vjp

MIN_DIVISOR = 1e-12
"""Lower bound of divisors."""


class FedTailLoss:
    """The terms of the loss at weights w: scalars, (classes,), or of the inputs' shape."""

    def __init__(self, client: Client, step: int, *, alpha: float, adversarial: float) -> None:
        self._client, self._step = client, step
        self._alpha, self._adversarial = alpha, adversarial

    def regularization(self, w: Tensor, weights: Tensor, shift: Tensor | None) -> Tensor:
        """Return the sum of all terms but L_cls. `weights`: γ of each class; `shift`: ε of each sample, None: 0."""
        total = weights @ self.by_class(w)
        if shift is not None:
            total = total + self.sharpness(w, shift)
        if self._adversarial:
            total = total + self.adversary(w) + self.discrimination(w)
        if self._adversarial and self._alpha:
            total = total + self.coherence(w)
        return total

    def classification(self, w: Tensor) -> Tensor:
        """Return L_cls: the mean cross entropy of the batch."""
        forward = self._forward(w)
        return _mean(_cross_entropies(forward), forward)

    def by_class(self, w: Tensor, shift: Tensor | None = None) -> Tensor:
        """Return L_c (classes,): the mean cross entropy of the batch's samples of class c; 0 if there are none."""
        forward = self._forward(w, shift)
        members = _members(forward)
        return (_cross_entropies(forward) @ members) / members.sum(dim=0).clamp(min=1)

    def shift(self, w: Tensor, rho: float) -> Tensor:
        """Return ε_c = ρ ∇L_c / |∇L_c| for the samples of class c, by the inputs: (samples, …)."""
        forward = self._forward(w)
        members = _members(forward)
        slope = grad(lambda shift: self.by_class(w, shift).sum())(torch.zeros_like(forward.inputs))
        norms = (slope.flatten(1).square().sum(dim=1) @ members).sqrt()
        return rho * slope / (members @ norms).clamp(min=MIN_DIVISOR).view(-1, *[1] * (slope.ndim - 1))

    def sharpness(self, w: Tensor, shift: Tensor) -> Tensor:
        """Return L_sharp: the KL divergence of the predictions for inputs from those for shifted inputs."""
        plain, shifted = self._forward(w), self._forward(w, shift)
        log_p, log_q = plain.outputs.log_softmax(dim=-1), shifted.outputs.log_softmax(dim=-1)
        return _mean((log_p.exp() * (log_p - log_q)).sum(dim=-1), plain)

    def adversary(self, w: Tensor) -> Tensor:
        """Return L_adv: minus the loss of the discriminator, whose weights are constant here."""
        forward = self._forward(w)
        return -self._domain_loss(forward, forward.features, *(part.detach() for part in _discriminator(forward)))

    def discrimination(self, w: Tensor) -> Tensor:
        """Return the discriminator's loss, with the representation constant."""
        forward = self._forward(w)
        return self._domain_loss(forward, forward.features.detach(), *_discriminator(forward))

    def coherence(self, w: Tensor) -> Tensor:
        """Return L_coh = -α ⟨∇L_cls, ∇L_adv⟩."""
        together = grad(self.classification)(w) @ grad(self.adversary)(w)
        return -self._alpha * together

    def _domain_loss(self, forward: ForwardPass, features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Return λ times the cross entropy of the client's number."""
        log_probabilities = functional.linear(features, weight, bias).log_softmax(dim=-1)
        is_client = torch.arange(len(bias), device=bias.device) == self._client.number
        return -self._adversarial * _mean(log_probabilities @ is_client.to(log_probabilities.dtype), forward)

    def _forward(self, w: Tensor, shift: Tensor | None = None) -> ForwardPass:
        return self._client.forward(w, self._step, shift=shift)


def curvatures(losses: Callable[[Tensor], Tensor], w: Tensor, steps: int) -> Tensor:
    """Return the largest singular value of each loss's Hessian at w, (classes,).

    By power iteration, which starts from the loss's gradient.
    """

    def power_iteration(class_weights: Tensor, start: Tensor) -> Tensor:
        def loss(w: Tensor) -> Tensor:
            return losses(w) @ class_weights

        times = vjp(grad(loss), w)[1]  # the Hessian is symmetric
        vector = _normalized(start)
        for _ in range(steps):
            vector = _normalized(times(vector))
        return _norm(times(vector))

    starts = jacrev(losses)(w)
    found: Tensor = vmap(power_iteration)(torch.eye(len(starts), dtype=w.dtype, device=w.device), starts)
    return found


def _normalized(vector: Tensor) -> Tensor:
    return vector / _norm(vector).clamp(min=MIN_DIVISOR)


def _norm(vector: Tensor) -> Tensor:
    return vector.square().sum().sqrt()


def _discriminator(forward: ForwardPass) -> tuple[Tensor, Tensor]:
    """Return its weight (clients, features) and bias (clients,)."""
    return forward.weights["discriminator.weight"], forward.weights["discriminator.bias"]


def _cross_entropies(forward: ForwardPass) -> Tensor:
    return functional.cross_entropy(forward.outputs, forward.labels, reduction="none")


def _members(forward: ForwardPass) -> Tensor:
    """Return (samples, classes): 1 for a sample's class, 0 elsewhere and for padding."""
    classes = torch.arange(forward.outputs.shape[-1], device=forward.labels.device)
    return (forward.labels[:, None] == classes).to(forward.is_sample.dtype) * forward.is_sample[:, None]


def _mean(values: Tensor, forward: ForwardPass) -> Tensor:
    return (values * forward.is_sample).sum() / forward.is_sample.sum()
