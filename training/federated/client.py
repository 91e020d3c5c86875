"""One client in one round, as an algorithm sees it.

An algorithm's functions are written for one client, with vectors and plain arithmetic, as its paper has them. The
engine runs them for many clients at once (torch.func.vmap), so they must not ask for a tensor's value (`if loss > 1`),
and change nothing in place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, grad_and_value

Correct = Callable[[Tensor, Tensor], Tensor]
"""(w, gradient at w) → the direction to go against."""
Beside = Callable[[Tensor], Tensor]
"""What entered the model's head (samples, features) → what is added to the loss of each sample (samples,)."""
Losses = Callable[[Tensor, Tensor, int, Beside | None], tuple[Tensor, Tensor]]
"""(w, statistics, step, beside) → mean loss of that step's batch, and the statistics after it."""


@dataclass(frozen=True)
class Look:
    """What a model makes of a step's batch, sample by sample, in training's mode."""

    inputs: Tensor
    """(samples, …): what it was called with."""
    entered: Tensor
    """(samples, features): what has entered its head."""
    answer: Tensor
    """(samples, classes)."""
    labels: Tensor
    """(samples,): the last part of the batch."""
    there: Tensor
    """(samples,): 1, or 0 in places of the batch that hold none."""
    weights: Mapping[str, Tensor]
    """The model's, by name."""


@dataclass(frozen=True)
class Sgd:
    """Describe how clients take steps of gradient descent: in the order of torch.optim.SGD."""

    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Return whether a step is w − η · gradient and nothing else."""
        return not self.momentum and not self.weight_decay

    def normalizer(self, steps: int) -> float:
        """Return how many gradients the update of so many steps adds up, ‖a‖₁ of FedNova's paper: `steps` if plain."""
        rho = self.momentum
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho) if rho else steps


class Client:
    """What one client has: the model that it was sent, its data, and what it kept of earlier rounds."""

    def __init__(
        self,
        model: Tensor,
        *,
        statistics: Tensor,
        losses: Losses,
        steps: int,
        sgd: Sgd,
        samples: Tensor,
        server: Mapping[str, Tensor],
        kept: Mapping[str, Tensor],
        everything: Callable[[Tensor], Tensor] | None = None,
        number: Tensor | None = None,
        looks: Callable[[Tensor, Tensor, int, Tensor | None], Look] | None = None,
        own: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] | None = None,
    ) -> None:
        self.model = model
        """(numbers,): as the round begins; its personal part at the end."""
        self.statistics = statistics
        """Running means and variances, as they are after the last step that was taken."""
        self._steps, self.sgd = steps, sgd
        self.learning_rate = sgd.learning_rate
        """The clients' rate of this round."""
        self.samples = samples
        """How many it has, a scalar."""
        self.server = server
        """What else the server sends, by the names in the algorithm's BROADCAST."""
        self.kept = dict(kept)
        """What this client keeps from round to round, by the names in the algorithm's `begin`: to be replaced."""
        self.number = number
        """Which it is of all clients, a scalar."""
        self._losses, self._everything, self._looks, self._own = losses, everything, looks, own
        self.went_own_way = False
        """Whether it has trained as it likes to, where it has a way of its own."""
        self.took_sgd_steps = False
        """Whether it has descended with `sgd`."""
        self._controlled: list[str] = []
        """Shared with `apart`, as Ditto's second model is trained there."""
        self._seen: list[Tensor] = []

    @property
    def steps(self) -> int:
        """Return how many batches it trains on."""
        self._controlled.append("counts the steps of clients")
        return self._steps

    @property
    def control(self) -> str:
        """Return what the algorithm did with single steps, as the end of a sentence; "" if it took only their result.

        A train() of the user's own knows nothing of it, so the algorithm would not be what its name says.
        """
        return (
            ""
            if self.went_own_way and not self._controlled
            else next(iter(self._controlled), "has clients take no steps")
        )

    def gradient(self, w: Tensor, step: int, *, beside: Beside | None = None) -> Tensor:
        """Of the mean loss of a step's batch, at w. Running statistics go on with it.

        `beside` makes a further term; only for algorithms that say HEAD.
        """

        def loss(w: Tensor) -> tuple[Tensor, Tensor]:
            return self._losses(w, self.statistics, step, beside)

        self._controlled.append("takes or corrects the steps of clients itself")
        gradient: Tensor
        gradient, (value, self.statistics) = grad_and_value(loss, has_aux=True)(w)
        self._seen.append(value)
        return gradient

    def descend(
        self,
        correct: Correct | None = None,
        *,
        begin: Tensor | None = None,
        beside: Callable[[int], Beside] | None = None,
    ) -> Tensor:
        """Return where all its steps of gradient descent lead: w ← w − η · correct(w, gradient).

        With weight decay λ the gradient is g + λw, so that what it is corrected with sees the decayed objective; with
        momentum the corrected directions add up. Where the client has its own train(), and nothing is corrected:
        return where that leads. `beside`: (step) → a further term of that step's loss, as `gradient` takes it.
        """
        if self._own is not None and correct is None and begin is None and beside is None:
            w, self.statistics, loss = self._own(self.model, self.statistics)
            self._seen.append(loss)
            self.went_own_way = True
            return w
        self.took_sgd_steps = True
        w = self.model if begin is None else begin
        velocity: Tensor | None = None
        for step in range(self._steps):
            gradient = self.gradient(w, step, beside=None if beside is None else beside(step))
            if self.sgd.weight_decay:
                gradient = torch.add(gradient, w, alpha=self.sgd.weight_decay)
            direction = gradient if correct is None else correct(w, gradient)
            if self.sgd.momentum:
                direction = velocity = _pushed(velocity, direction, self.sgd.momentum)
            w = self.step(w, direction)
        return w

    def step(self, w: Tensor, direction: Tensor) -> Tensor:
        """w − η · direction, in one pass: a product by itself would be as large again for all stacked clients."""
        return torch.sub(w, direction, alpha=self.learning_rate)

    def represent(self, w: Tensor, step: int) -> Tensor:
        """What enters the head of the model w for a step's batch, (samples, features), in training's mode.

        Only for algorithms that say HEAD.
        """
        entered: list[Tensor] = []

        def take(representation: Tensor) -> Tensor:
            entered.append(representation)
            return representation.new_zeros(len(representation))

        self._losses(w, self.statistics, step, take)
        return entered[0]

    def apart(self) -> Client:
        """The same client, for steps beside those that count: this one's losses and statistics stay as they are."""
        other = copy.copy(self)
        other._seen = []
        return other

    def look(self, w: Tensor, step: int, *, shift: Tensor | None = None) -> Look:
        """At a step's batch through the model w. `shift` (samples, …): added to what it is called with.

        Only for models with a head. Running statistics stay as they are.
        """
        assert self._looks is not None
        return self._looks(w, self.statistics, step, shift)

    def loss(self, w: Tensor) -> Tensor:
        """The mean over everything that it has. Only for algorithms that say WHOLE."""
        assert self._everything is not None
        return self._everything(w)

    def whole_gradient(self, w: Tensor) -> Tensor:
        """Of the mean loss over everything that it has. Only for algorithms that say WHOLE."""
        assert self._everything is not None
        gradient: Tensor = grad(self._everything)(w)
        return gradient

    @property
    def seen(self) -> Tensor:
        """The mean loss of the batches that it has trained on, a scalar; NaN: none."""
        return torch.stack(self._seen).mean() if self._seen else self.model.new_full((), torch.nan)


def _pushed(velocity: Tensor | None, direction: Tensor, momentum: float) -> Tensor:
    """Return the next velocity; the first is the direction itself."""
    return direction if velocity is None else torch.add(direction, velocity, alpha=momentum)
