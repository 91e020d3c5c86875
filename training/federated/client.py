"""A client in one round, as an algorithm's `train(client)` receives it.

An algorithm's functions are written for one client, with vectors and plain arithmetic, as its paper has them. The
engine runs them for many clients at once (torch.func.vmap), so they must not branch on a tensor's value (`if loss > 1`)
nor change anything in place.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from training.federated.differentiation import grad, grad_and_value

Correction = Callable[[Tensor, Tensor], Tensor]
"""(w, gradient at w) → the direction to step against."""
ExtraLoss = Callable[[Tensor], Tensor]
"""Features that enter the model's head (samples, features) → a term added to each sample's loss (samples,)."""
BatchLoss = Callable[[Tensor, Tensor, int, ExtraLoss | None], tuple[Tensor, Tensor]]
"""(w, statistics, step, extra_loss) → mean loss of that step's batch, and the statistics after it."""


@dataclass(frozen=True)
class ForwardPass:
    """A forward pass of one step's batch in training mode.

    Deprecated names of its fields: `entered` (features), `answer` (outputs), `there` (is_sample).
    """

    inputs: Tensor
    """(samples, …): the model's first argument."""
    features: Tensor
    """(samples, features): the input of the model's head."""
    outputs: Tensor
    """(samples, classes): what the model returns."""
    labels: Tensor
    """(samples,): the last part of the batch."""
    is_sample: Tensor
    """(samples,): 1 for a sample, 0 for padding of the batch."""
    weights: Mapping[str, Tensor]
    """The model's parameters by name."""

    @property
    def entered(self) -> Tensor:
        """Return `features`. Deprecated."""
        return self.features

    @property
    def answer(self) -> Tensor:
        """Return `outputs`. Deprecated."""
        return self.outputs

    @property
    def there(self) -> Tensor:
        """Return `is_sample`. Deprecated."""
        return self.is_sample


@dataclass(frozen=True)
class Sgd:
    """The options of the clients' gradient steps, which are applied in the order of torch.optim.SGD."""

    learning_rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Return whether a step is w − η · gradient and nothing else."""
        return not self.momentum and not self.weight_decay

    def normalizer(self, steps: int) -> float:
        """Return the sum of the weights of all gradients in an update of `steps` steps: `steps` if the steps are plain.

        It is ‖a‖₁ of FedNova's paper (Wang et al., 2020, arXiv 2007.07481).
        """
        rho = self.momentum
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho) if rho else steps


@dataclass(frozen=True, kw_only=True)
class ClientInputs:
    """The inputs that all clients of a chunk have in common."""

    model: Tensor
    """(parameters,): the shared part of the model that they start from."""
    statistics: Tensor
    """(statistics,): the server's running statistics."""
    server: Mapping[str, Tensor]
    """Vectors that the server sends along with the model, by name."""
    steps: int
    """Steps of each client."""
    sgd: Sgd
    round: int


@dataclass(frozen=True)
class ClientFunctions:
    """The functions of a client that run its model; the engine provides them."""

    loss: BatchLoss
    forward: Callable[[Tensor, Tensor, int, Tensor | None], ForwardPass]
    """(w, statistics, step, shift) → the forward pass of that step's batch."""
    whole_loss: Callable[[Tensor], Tensor] | None = None
    """(w) → mean loss over all samples; None: the algorithm does not use it."""
    custom_train: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] | None = None
    """(w, statistics) → (w, statistics, mean loss) after train() of client.py; None: it has none."""


class Client:
    """A client in one round: the model that it was sent, its data, and its state from earlier rounds.

    Names that earlier releases used still work, and are deprecated: `kept` (now `state`), `apart` (`scratch_copy`),
    `look` (`forward`), and the argument `beside` (`extra_loss`).
    """

    def __init__(
        self,
        inputs: ClientInputs,
        *,
        model: Tensor,
        statistics: Tensor,
        samples: Tensor,
        state: Mapping[str, Tensor],
        number: Tensor,
        functions: ClientFunctions,
    ) -> None:
        """`model`, `statistics`: with the client's personal part, where it has one."""
        self.model = model
        """(parameters,): the model as the round begins, its personal part last."""
        self.statistics = statistics
        """(statistics,): running means and variances after the last step that was taken."""
        self._steps, self.sgd = inputs.steps, inputs.sgd
        self.learning_rate = inputs.sgd.learning_rate
        """The clients' learning rate in this round."""
        self.samples = samples
        """The number of its training samples, a scalar."""
        self.server = inputs.server
        """Vectors that the server sends along with the model, by the names in the algorithm's BROADCAST."""
        self.state = dict(state)
        """What this client stores from round to round, by the names in `initial_client_state`. Replace its entries."""
        self.number = number
        """The client's number, a scalar."""
        self._functions = functions
        self.used_custom_train = False
        """Whether train() of a client.py has trained it."""
        self.took_sgd_steps = False
        """Whether it has taken gradient steps with `sgd`."""
        self._step_handling: list[str] = []
        """What the algorithm did with single steps. Scratch copies share it: Ditto trains its second model in one."""
        self._step_losses: list[Tensor] = []

    @property
    def steps(self) -> int:
        """Return how many batches the client trains on."""
        self._step_handling.append("counts the steps of clients")
        return self._steps

    @property
    def step_handling(self) -> str:
        """Return how the algorithm handles single steps, as the end of an error; "" if it only uses their result.

        The train() of a client.py would ignore it, and the run would not be what the algorithm's name says.
        """
        return (
            ""
            if self.used_custom_train and not self._step_handling
            else next(iter(self._step_handling), "has clients take no steps")
        )

    def gradient(
        self, w: Tensor, step: int, *, extra_loss: ExtraLoss | None = None, beside: ExtraLoss | None = None
    ) -> Tensor:
        """Return the gradient (parameters,) of the mean loss of a step's batch at w, and update the running statistics.

        `extra_loss` adds a term to the loss of each sample; the algorithm must define NEEDS_HEAD = True. `beside` is
        its deprecated name.
        """
        extra_loss = extra_loss or beside

        def loss(w: Tensor) -> tuple[Tensor, Tensor]:
            return self._functions.loss(w, self.statistics, step, extra_loss)

        self._step_handling.append("takes or corrects the steps of clients itself")
        gradient: Tensor
        gradient, (value, self.statistics) = grad_and_value(loss)(w)
        self._step_losses.append(value)
        return gradient

    def descend(
        self,
        correct: Correction | None = None,
        *,
        begin: Tensor | None = None,
        extra_loss: Callable[[int], ExtraLoss] | None = None,
        beside: Callable[[int], ExtraLoss] | None = None,
    ) -> Tensor:
        """Take all steps of gradient descent, w ← w − η · correct(w, gradient), and return the last w (parameters,).

        With weight decay λ the gradient is g + λw, so the correction sees the gradient of the decayed objective; with
        momentum the corrected directions accumulate. If client.py has a train() and there is nothing to correct, it
        runs instead. `begin`: the first w, else the model that was sent. `extra_loss`: (step) → a term of that step's
        loss, as in `gradient`; `beside` is its deprecated name.
        """
        extra_loss = extra_loss or beside
        if self._functions.custom_train is not None and correct is None and begin is None and extra_loss is None:
            w, self.statistics, loss = self._functions.custom_train(self.model, self.statistics)
            self._step_losses.append(loss)
            self.used_custom_train = True
            return w
        self.took_sgd_steps = True
        w = self.model if begin is None else begin
        velocity: Tensor | None = None
        for step in range(self._steps):
            gradient = self.gradient(w, step, extra_loss=None if extra_loss is None else extra_loss(step))
            if self.sgd.weight_decay:
                gradient = torch.add(gradient, w, alpha=self.sgd.weight_decay)
            direction = gradient if correct is None else correct(w, gradient)
            if self.sgd.momentum:
                direction = velocity = _next_velocity(velocity, direction, self.sgd.momentum)
            w = self.step(w, direction)
        return w

    def step(self, w: Tensor, direction: Tensor) -> Tensor:
        """Return w − η · direction in one pass: a separate product would double the memory of all stacked clients."""
        return torch.sub(w, direction, alpha=self.learning_rate)

    def represent(self, w: Tensor, step: int) -> Tensor:
        """Return the input of the model's head at w for a step's batch, (samples, features), in training mode.

        The algorithm must define NEEDS_HEAD = True.
        """
        features: list[Tensor] = []

        def take(representation: Tensor) -> Tensor:
            features.append(representation)
            return representation.new_zeros(len(representation))

        self._functions.loss(w, self.statistics, step, take)
        return features[0]

    def scratch_copy(self) -> Client:
        """Return a copy for additional steps, which do not change this client's losses and statistics."""
        other = copy.copy(self)
        other._step_losses = []
        return other

    def forward(self, w: Tensor, step: int, *, shift: Tensor | None = None) -> ForwardPass:
        """Run a step's batch through the model at w, without changing running statistics. The model must have a head.

        `shift` (samples, …): added to the model's inputs.
        """
        return self._functions.forward(w, self.statistics, step, shift)

    def loss(self, w: Tensor) -> Tensor:
        """Return the mean loss at w over all of the client's samples, a scalar.

        The algorithm must define USES_ALL_SAMPLES = True.
        """
        assert self._functions.whole_loss is not None
        return self._functions.whole_loss(w)

    def whole_gradient(self, w: Tensor) -> Tensor:
        """Return the gradient of that loss at w, (parameters,). The algorithm must define USES_ALL_SAMPLES = True."""
        assert self._functions.whole_loss is not None
        return grad(self._functions.whole_loss)(w)

    @property
    def mean_loss(self) -> Tensor:
        """Return the mean loss of the batches that it trained on, a scalar; NaN if there are none."""
        return torch.stack(self._step_losses).mean() if self._step_losses else self.model.new_full((), torch.nan)

    # Names of earlier releases, which algorithm.py files may still use. Deprecated.

    @property
    def kept(self) -> dict[str, Tensor]:
        """Return `state`. Deprecated."""
        return self.state

    @kept.setter
    def kept(self, state: Mapping[str, Tensor]) -> None:
        self.state = dict(state)

    def apart(self) -> Client:
        """Return `scratch_copy()`. Deprecated."""
        return self.scratch_copy()

    def look(self, w: Tensor, step: int, *, shift: Tensor | None = None) -> ForwardPass:
        """Return `forward(w, step, shift=shift)`. Deprecated."""
        return self.forward(w, step, shift=shift)


def _next_velocity(velocity: Tensor | None, direction: Tensor, momentum: float) -> Tensor:
    """Return the next velocity; the first is the direction itself."""
    return direction if velocity is None else torch.add(direction, velocity, alpha=momentum)
