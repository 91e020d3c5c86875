"""Sequential compression layers in a Llama: h + C2 φ(C1 h) enters down_proj instead of h (2024, arXiv 2412.07021)."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.models.llama import Linear, Mlp

PART = re.compile(r"\.compress_(?P<number>[12])\.weight$")


class Compressed(Linear):
    """The down projection, with its weight under the same name, preceded by a compression layer."""

    def __init__(self, down: nn.Linear, rank: int) -> None:
        super().__init__(down.in_features, down.out_features, bias=False, device=down.weight.device)
        self.weight = down.weight
        self.compress_1 = Linear(down.in_features, rank, bias=False, device=down.weight.device)
        self.compress_2 = Linear(rank, down.in_features, bias=False, device=down.weight.device)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden + self.compress_2(functional.silu(self.compress_1(hidden))))


def add(model: nn.Module, rank: int) -> list[Compressed]:
    """Add compression layers, without weights yet, to every gated network; existing names do not change."""
    added = []
    for module in [module for module in model.modules() if isinstance(module, Mlp)]:
        layer = Compressed(module.down, rank)
        module.down = layer
        added.append(layer)
    return added


def is_part(name: str) -> bool:
    """Return whether a parameter with this name belongs to a compression layer."""
    return PART.search(name) is not None


def initialise(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Initialise C1 uniformly within 1 / √(inputs), C2 with zeros."""
    match = PART.search(name)
    assert match is not None
    if match["number"] == "2":
        tensor.zero_()
    else:
        bound = 1 / math.sqrt(tensor.shape[1])
        tensor.uniform_(-bound, bound, generator=generator)
