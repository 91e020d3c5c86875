"""The terms of FEDTAIL's loss for one batch of one client, as functions of its weights (algorithms.fedtail)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import grad, jacrev, vjp, vmap
from torch.nn import functional

from training.federated.client import Client, Look

SMALLEST = 1e-12
"""What is divided by is at least this."""


class Terms:
    """Each is a scalar, (classes,) or the inputs' shape, at the weights w."""

    def __init__(self, client: Client, step: int, *, alpha: float, adversarial: float) -> None:
        self._client, self._step = client, step
        self._alpha, self._adversarial = alpha, adversarial

    def beside(self, w: Tensor, weights: Tensor, shift: Tensor | None) -> Tensor:
        """All but L_cls. `weights`: γ of each class; `shift`: ε of each sample; None: 0."""
        total = weights @ self.by_class(w)
        if shift is not None:
            total = total + self.sharpness(w, shift)
        if self._adversarial:
            total = total + self.adversary(w) + self.discrimination(w)
        if self._adversarial and self._alpha:
            total = total + self.coherence(w)
        return total

    def classification(self, w: Tensor) -> Tensor:
        """L_cls: the mean over the batch."""
        look = self._look(w)
        return _mean(_cross_entropies(look), look)

    def by_class(self, w: Tensor, shift: Tensor | None = None) -> Tensor:
        """(classes,), L_c: the mean over those of the batch that are of class c; 0: there are none."""
        look = self._look(w, shift)
        members = _members(look)
        return (_cross_entropies(look) @ members) / members.sum(dim=0).clamp(min=1)

    def shift(self, w: Tensor, rho: float) -> Tensor:
        """(samples, …), ε_c = ρ ∇L_c / |∇L_c| for the samples of class c, by the inputs."""
        look = self._look(w)
        members = _members(look)
        slope: Tensor = grad(lambda shift: self.by_class(w, shift).sum())(torch.zeros_like(look.inputs))
        lengths = (slope.flatten(1).square().sum(dim=1) @ members).sqrt()
        return rho * slope / (members @ lengths).clamp(min=SMALLEST).view(-1, *[1] * (slope.ndim - 1))

    def sharpness(self, w: Tensor, shift: Tensor) -> Tensor:
        """L_sharp: KL of what the model says of the inputs from what it says of them shifted."""
        look, beside = self._look(w), self._look(w, shift)
        said, said_beside = look.answer.log_softmax(dim=-1), beside.answer.log_softmax(dim=-1)
        return _mean((said.exp() * (said - said_beside)).sum(dim=-1), look)

    def adversary(self, w: Tensor) -> Tensor:
        """L_adv: minus how badly the client is told, by a discriminator that is held."""
        look = self._look(w)
        return -self._told(look, look.entered, *(part.detach() for part in _discriminator(look)))

    def discrimination(self, w: Tensor) -> Tensor:
        """The discriminator's own loss, of a representation that is held."""
        look = self._look(w)
        return self._told(look, look.entered.detach(), *_discriminator(look))

    def coherence(self, w: Tensor) -> Tensor:
        """L_coh: -α ⟨∇L_cls, ∇L_adv⟩."""
        together: Tensor = grad(self.classification)(w) @ grad(self.adversary)(w)
        return -self._alpha * together

    def _told(self, look: Look, entered: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """λ times the cross-entropy of the client's number."""
        assert self._client.number is not None
        said = functional.linear(entered, weight, bias).log_softmax(dim=-1)
        is_own = torch.arange(len(bias), device=bias.device) == self._client.number
        return -self._adversarial * _mean(said @ is_own.to(said.dtype), look)

    def _look(self, w: Tensor, shift: Tensor | None = None) -> Look:
        return self._client.look(w, self._step, shift=shift)


def curvatures(losses: Callable[[Tensor], Tensor], w: Tensor, steps: int) -> Tensor:
    """(classes,): of each loss the largest singular value of its Hessian at w, by power iteration from its gradient."""

    def one(picked: Tensor, start: Tensor) -> Tensor:
        def loss(w: Tensor) -> Tensor:
            return losses(w) @ picked

        times = vjp(grad(loss), w)[1]  # the Hessian is its own transpose
        vector = _unit(start)
        for _ in range(steps):
            vector = _unit(times(vector)[0])
        return _length(times(vector)[0])

    starts = jacrev(losses)(w)
    found: Tensor = vmap(one)(torch.eye(len(starts), dtype=w.dtype, device=w.device), starts)
    return found


def _unit(vector: Tensor) -> Tensor:
    return vector / _length(vector).clamp(min=SMALLEST)


def _length(vector: Tensor) -> Tensor:
    return vector.square().sum().sqrt()


def _discriminator(look: Look) -> tuple[Tensor, Tensor]:
    """(clients, features), (clients,)."""
    return look.weights["discriminator.weight"], look.weights["discriminator.bias"]


def _cross_entropies(look: Look) -> Tensor:
    """(samples,)"""
    return functional.cross_entropy(look.answer, look.labels, reduction="none")


def _members(look: Look) -> Tensor:
    """(samples, classes): 1 for a sample's class."""
    classes = torch.arange(look.answer.shape[-1], device=look.labels.device)
    return (look.labels[:, None] == classes).to(look.there.dtype) * look.there[:, None]


def _mean(values: Tensor, look: Look) -> Tensor:
    return (values * look.there).sum() / look.there.sum()
