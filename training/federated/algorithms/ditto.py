"""Ditto: each client has a model of its own, held near the global one (Li et al., 2020, arXiv 2012.04221).

The global one is FedAvg's; the own one takes as many steps on the same batches, and never travels.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

if TYPE_CHECKING:
    from torch import Tensor

    from training.federated.client import Client
    from training.federated.server import Round

SENT = {"delta": "samples"}


def begin(model: Tensor, **options: object) -> Mapping[str, Tensor]:
    return {"personal_model": model}


def train(
    client: Client,
    *,
    pull: Annotated[float, "0..1000", "λ: how strongly; 0: clients learn alone."] = 0.1,
) -> Mapping[str, Tensor]:
    def held(v: Tensor, gradient: Tensor) -> Tensor:
        return gradient + pull * (v - client.model)

    delta = client.descend() - client.model
    client.kept["personal_model"] = client.apart().descend(held, begin=client.kept["personal_model"])
    return {"delta": delta}


def aggregate(server: Round, **options: object) -> Tensor:
    return server.model + server.mean["delta"]


def own(model: Tensor, kept: Mapping[str, Tensor], **options: object) -> Tensor:
    return kept["personal_model"]
