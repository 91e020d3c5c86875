"""Ditto: each client also trains a personal model, pulled towards the global one (Li et al., 2020, arXiv 2012.04221).

The global model is FedAvg's; the personal one takes as many steps on the same batches, and never travels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client

SENT = {"delta": "samples"}


def initial_client_state(model: Tensor, **options: object) -> Mapping[str, Tensor]:
    return {"personal_model": model}


def train(
    client: Client,
    *,
    pull: Annotated[float, "0..1000", "λ, the strength of the pull; 0: clients learn alone."] = 0.1,
) -> Mapping[str, Tensor]:
    def pulled(v: Tensor, gradient: Tensor) -> Tensor:
        return gradient + pull * (v - client.model)

    delta = client.descend() - client.model
    client.state["personal_model"] = client.scratch_copy().descend(pulled, begin=client.state["personal_model"])
    return {"delta": delta}


def personalized_model(model: Tensor, state: Mapping[str, Tensor], **options: object) -> Tensor:
    return state["personal_model"]
