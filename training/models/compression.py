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
    """down_proj, its own weight under its own name, and what comes before it."""

    def __init__(self, down: nn.Linear, rank: int) -> None:
        super().__init__(down.in_features, down.out_features, bias=False, device=down.weight.device)
        self.weight = down.weight
        self.compress_1 = Linear(down.in_features, rank, bias=False, device=down.weight.device)
        self.compress_2 = Linear(rank, down.in_features, bias=False, device=down.weight.device)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden + self.compress_2(functional.silu(self.compress_1(hidden))))


def add(model: nn.Module, rank: int) -> list[Compressed]:
    """Puts them into every gated network, without weights yet; names of what was there stay."""
    found = []
    for module in [module for module in model.modules() if isinstance(module, Mlp)]:
        layer = Compressed(module.down, rank)
        module.down = layer
        found.append(layer)
    return found


def is_part(name: str) -> bool:
    """Whether a parameter of this name is one of theirs."""
    return PART.search(name) is not None


def initialise(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """C1 evenly within 1 / √(what enters), C2 zero."""
    found = PART.search(name)
    assert found is not None
    if found["number"] == "2":
        tensor.zero_()
    else:
        bound = 1 / math.sqrt(tensor.shape[1])
        tensor.uniform_(-bound, bound, generator=generator)
