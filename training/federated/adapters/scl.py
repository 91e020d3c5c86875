"""SCL: small layers before down_proj of each gated network are trained and sent (2024, arXiv 2412.07021).

**The residual, φ and the zero initialisation are ours**: the paper's text and repository do not define them. The input
h of down_proj becomes h + C2 φ(C1 h), φ being SiLU as in the network itself. C2 is initialised with zeros, so that a
run starts exactly from the pretrained weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from training.config.shape import Misfit
from training.data import Task
from training.federated.adapters import _checks
from training.federation.config import FederationConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

KEEPS_BASE = True


def adapt(
    task: Task,
    *,
    rank: Annotated[int, "1..65536", "Rows of C1."] = 8,
    train_down_proj: Annotated[
        bool, "Train and send down_proj, too, as in the paper: some hundred times as many parameters."
    ] = False,
) -> Task:
    from training.models import compression

    task.model.requires_grad_(False)
    layers = compression.add(task.model, rank)
    for layer in layers:
        layer.weight.requires_grad_(train_down_proj)
    begin, stored = task.initialise, task.weights
    assert begin is not None

    def initialise(name: str, tensor: Tensor, generator: torch.Generator) -> None:
        if compression.is_part(name):
            compression.initialise(name, tensor, generator)
        else:
            begin(name, tensor, generator)

    def weights(name: str) -> Tensor | None:
        return None if stored is None or compression.is_part(name) else stored(name)

    added = sum(part.numel() for name, part in task.model.named_parameters() if compression.is_part(name))
    down = sum(layer.weight.numel() for layer in layers)
    facts = {**task.facts, "compression_numbers": added, "down_proj_numbers": down}
    return replace(task, initialise=initialise, weights=weights, facts=facts)


def check(config: FederationConfig) -> Iterator[Misfit]:
    yield from _checks.check_place(config)
    options = config.recipe_options()
    if options.get("from_weights") == "none":
        yield Misfit(
            f"{config.recipe}.from_weights",
            'is "none", but adapters need pretrained weights. Name some, or write adapters = "none".',
        )
