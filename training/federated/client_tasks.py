"""What clients are asked, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.func import vmap

from training.federated.model import STATISTICS
from training.federated.schedule import Ids

SAMPLES, CLIENTS = "samples", "clients"
"""What sums are weighted by."""


@dataclass(frozen=True)
class Question:
    """What clients are asked, and what comes back."""

    name: str
    answer: Callable[..., Mapping[str, Tensor]]
    """(client): what one client sends, by the names in `sent`."""
    sent: Mapping[str, str]
    """By what each is weighted: "samples" or "clients"."""
    vectors: Mapping[str, Tensor] = field(default_factory=dict)
    """What is sent beside the model."""
    fold: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None
    """(what one client sent): what of it is added up."""
    is_whole: bool = False
    """Whether clients look at everything that they have."""
    takes_steps: bool = True
    """Whether they go through it in batches."""
    model: Tensor | None = None
    """The shared part that clients start from; None: the server's."""
    trains: bool = False
    """Clients keep what they have come to."""

    def weighted_by(self, name: str) -> str:
        return SAMPLES if name == STATISTICS else self.sent[name]

    def folded(self, values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """(clients, numbers) by name: of what they have sent, what is added up."""
        found = vmap(self.fold)(dict(values)) if self.fold is not None and values else values
        return {name: value.reshape(len(value), -1) for name, value in found.items()}


@dataclass
class Sent:
    """What a chunk's clients have sent, in the order of its clients; and what they keep."""

    clients: Ids
    values: dict[str, Tensor]
    """(clients, …) by name, as the server has them."""
    kept: dict[str, Tensor]
    """(clients, …) by name."""
    losses: Tensor
    """(clients,): mean over the batches that each has trained on."""
    has_losses: bool = True
    failed: dict[int, str] = field(default_factory=dict)
    """Client → its traceback. It is among `clients`, and what stands for it counts for nothing."""
    wire: dict[str, Tensor] = field(default_factory=dict)
    """(clients, …) by name: what a message of each holds, from which the server has `values`."""
    seconds: list[float] = field(default_factory=list)
    """(clients,): what each has taken; empty: they were computed together."""
