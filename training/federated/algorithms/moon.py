"""MOON: a client's model must see samples as the global one does (Li et al., 2021, arXiv 2103.16257).

And not as its own did when it was last sent: a contrast of cosines. How a model sees a sample is what enters its head.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Beside, Client
    from training.federated.server import Round

SENT = {"delta": "samples"}
HEAD = True


def begin(model: Tensor, **options: object) -> Mapping[str, Tensor]:
    return {"previous": model}


def train(
    client: Client,
    *,
    mu: Annotated[float, "0..1000", "How strongly; 0: not at all, as in FedAvg."] = 1.0,
    temperature: Annotated[float, "0.001..100", "The lower, the more the nearer of the two decides."] = 0.5,
) -> Mapping[str, Tensor]:
    def beside(step: int) -> Beside:
        towards = client.represent(client.model, step)
        away = client.represent(client.kept["previous"], step)
        return partial(_contrast, towards=towards, away=away, mu=mu, temperature=temperature)

    w = client.descend(beside=beside)
    client.kept["previous"] = w
    return {"delta": w - client.model}


def aggregate(server: Round, **options: object) -> Tensor:
    return server.model + server.mean["delta"]


def _contrast(own: Tensor, *, towards: Tensor, away: Tensor, mu: float, temperature: float) -> Tensor:
    """−μ log (e^a / (e^a + e^b)), a and b the cosines over the temperature; of each sample."""
    from torch.nn.functional import cosine_similarity, softplus

    apart = cosine_similarity(own, away, dim=1) - cosine_similarity(own, towards, dim=1)
    return mu * softplus(apart / temperature)
