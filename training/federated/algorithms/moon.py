"""MOON: a contrastive loss pulls clients' features towards the global model's (Li et al., 2021, arXiv 2103.16257).

And away from those of the client's own last model, by cosine similarity. Features are the input of the model's head.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client, ExtraLoss

SENT = {"delta": "samples"}
NEEDS_HEAD = True


def initial_client_state(model: Tensor, **options: object) -> Mapping[str, Tensor]:
    return {"previous": model}


def train(
    client: Client,
    *,
    mu: Annotated[float, "0..1000", "μ, weight of the contrastive loss; 0: FedAvg."] = 1.0,
    temperature: Annotated[float, "0.001..100", "Temperature of the contrastive loss."] = 0.5,
) -> Mapping[str, Tensor]:
    def contrast(step: int) -> ExtraLoss:
        global_features = client.represent(client.model, step)
        previous_features = client.represent(client.state["previous"], step)
        return partial(
            _contrast,
            global_features=global_features,
            previous_features=previous_features,
            mu=mu,
            temperature=temperature,
        )

    w = client.descend(extra_loss=contrast)
    client.state["previous"] = w
    return {"delta": w - client.model}


def _contrast(
    features: Tensor, *, global_features: Tensor, previous_features: Tensor, mu: float, temperature: float
) -> Tensor:
    """Return −μ log (e^a / (e^a + e^b)) of each sample, (samples,), a and b being the cosines over the temperature."""
    from torch.nn.functional import cosine_similarity, softplus

    a = cosine_similarity(features, global_features, dim=1)
    b = cosine_similarity(features, previous_features, dim=1)
    return mu * softplus((b - a) / temperature)
