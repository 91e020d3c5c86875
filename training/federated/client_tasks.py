"""Tasks that the server gives to clients, and the updates that clients send back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.func import vmap

from training.federated.model import STATISTICS
from training.federated.schedule import Ids

SAMPLES, CLIENTS = "samples", "clients"
"""Weights of a sum: the number of a client's samples, or 1 for each client."""


@dataclass(frozen=True)
class ClientTask:
    """A task for clients: what each of them computes, and how the server sums the results."""

    name: str
    compute: Callable[..., Mapping[str, Tensor]]
    """(client): compute what one client sends, by the names in `weighting`."""
    weighting: Mapping[str, str]
    """The weights of each name's sum: "samples" or "clients"."""
    vectors: Mapping[str, Tensor] = field(default_factory=dict)
    """Vectors that the server sends along with the model, by name."""
    fold: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None
    """(what one client sent): return what the server sums of it; None: what was sent."""
    uses_all_samples: bool = False
    """Whether clients compute the loss over all of their samples."""
    takes_steps: bool = True
    """Whether they iterate over their samples in batches."""
    model: Tensor | None = None
    """The shared part (parameters,) of the model that clients start from; None: the server's."""
    is_training: bool = False
    """Whether clients store the new state that the task leaves them with."""

    def weights_of(self, name: str) -> str:
        """Return SAMPLES or CLIENTS; running statistics are always weighted by samples."""
        return SAMPLES if name == STATISTICS else self.weighting[name]

    def summands(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return what the server sums of the clients' values (clients, …): (clients, size) by name."""
        found = vmap(self.fold)(dict(values)) if self.fold is not None and values else values
        return {name: value.reshape(len(value), -1) for name, value in found.items()}


@dataclass
class ClientUpdates:
    """The updates that the clients of one chunk sent, and their new state, in the order of `clients`."""

    clients: Ids
    values: dict[str, Tensor]
    """(clients, …) by name, as the server decodes them."""
    state: dict[str, Tensor]
    """(clients, …) by name: what each client stores until its next round."""
    losses: Tensor
    """(clients,): mean loss of the batches that each client trained on."""
    has_losses: bool = True
    failed: dict[int, str] = field(default_factory=dict)
    """Tracebacks by client. Failed clients are among `clients`; their rows are placeholders that must not be used."""
    wire: dict[str, Tensor] = field(default_factory=dict)
    """(clients, …) by name: the content of each client's message, from which the server decodes `values`."""
    seconds: list[float] = field(default_factory=list)
    """(clients,): compute time of each; empty where clients were computed together."""
