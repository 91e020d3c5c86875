"""LoRA (Hu et al., 2021, arXiv 2106.09685): small trained matrices added to frozen ones, by the package peft.

A matrix W becomes W + alpha / rank · B·A. A starts random and B as zeros, so that a run starts exactly at its initial
weights. Only A and B are trained, averaged over ranks, counted in the gradient's norm and saved in checkpoints; the
frozen weights are stored once next to the checkpoints (training.weights.base).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.corpus.errors import DataError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from training.config.base import BaseRunConfig
    from training.config.run_config import RunConfig
    from training.config.shape import Shape
    from training.federation.config import FederationConfig

TARGETS = ("query", "key", "value", "out", "gate", "up", "down")
ALL = "all"
NAME = "default"
"""peft's name of a single adapter."""
PART = re.compile(rf"\.lora_(?P<side>[AB])\.{NAME}\.weight$")
PARALLELISMS = ("ddp", "fsdp")
FEDERATED = ("lora", "ffa_lora")
"""The choices of a federation's adapters that use LoRA."""


@dataclass(frozen=True)
class Lora:
    """The adapters that a run requests."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]

    @classmethod
    def parse(cls, rank: int, alpha: float | None, dropout: float, targets: str) -> Lora:
        words = tuple(dict.fromkeys(targets.replace(",", " ").split()))
        return cls(rank, alpha or 2.0 * rank, dropout, TARGETS if words == (ALL,) else words)

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Lora | None:
        """Return the adapters that a recipe's options request; None: all weights are trained."""
        if not options.get("lora_rank"):
            return None
        return cls.parse(
            options["lora_rank"],
            options.get("lora_alpha"),
            options.get("lora_dropout", 0.0),
            options.get("lora_targets", "query value"),
        )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def problems(config: BaseRunConfig, shape: Shape) -> Iterator[tuple[str, str]]:
    """Yield (field below [run], what is wrong and the fix). Combinations that no test covers are refused."""
    from training.config.run_config import RunConfig
    from training.federation.config import FederationConfig

    options = config.recipe_options()
    lora = Lora.from_options(options)
    assert lora is not None
    table = config.recipe
    if options.get("from_weights", "none") == "none":
        yield f"{table}.lora_rank", "needs trained weights. Name them in from_weights, or write 0."
    choices_text = f"Write some of {', '.join(TARGETS)}, or {ALL}."
    if not lora.targets:
        yield f"{table}.lora_targets", f"is empty. {choices_text}"
    elif odd := next((word for word in lora.targets if word not in TARGETS), None):
        yield f"{table}.lora_targets", f'"{odd}" is not a matrix of a block. {choices_text}'
    if isinstance(config, RunConfig):
        yield from _trainer_problems(config, shape)
    if isinstance(config, FederationConfig):
        yield from _federation_problems(config)


def _trainer_problems(config: RunConfig, shape: Shape) -> Iterator[tuple[str, str]]:
    if config.parallelism not in PARALLELISMS:
        names = " or ".join(f'"{name}"' for name in PARALLELISMS)
        yield "parallelism", f"{config.parallelism} is not supported with adapters. Write {names}."
    for axis in ("pp", "cp", "tp"):
        if shape[axis] > 1:
            yield f"mesh.{axis}", "is not supported with adapters. Leave it out; dp and shard are supported."
    if config.communication != "plain":
        message = f'{config.communication} is not supported with adapters, which are small. Write "plain".'
        yield "communication", message
    if config.dtype == "fp8":
        yield "dtype", 'is "fp8", which is not supported with adapters. Write "bf16".'


def _federation_problems(config: FederationConfig) -> Iterator[tuple[str, str]]:
    """Require that the federation's own field says what is sent: the recipe's rank alone adds no adapters."""
    if config.adapters not in FEDERATED:
        names = " or ".join(f'"{name}"' for name in FEDERATED)
        yield "adapters", f'is "{config.adapters}", but lora_rank asks for LoRA. Write {names}, or lora_rank = 0.'


def add(model: nn.Module, lora: Lora) -> None:
    """Add adapters to the model's matrices, on the meta device, and freeze everything else.

    Names of blocks do not change.

    Raises DataError if peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        message = "needs the package peft, which the job's Python does not have. Install it there (pip install peft)."
        raise DataError(message, "lora_rank") from None
    wanted = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # may be any number, as it is only divided by the rank
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
        bias="none",
    )
    inject_adapter_in_model(wanted, model, adapter_name=NAME, low_cpu_mem_usage=True)


def is_adapter(name: str) -> bool:
    """Return whether a parameter with this name belongs to an adapter."""
    return PART.search(name) is not None


def base_name(name: str) -> str:
    """Return the name that a frozen parameter has in a model without adapters."""
    return name.replace(".base_layer.", ".")


def initialise(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Initialise an adapter's parameter like peft, but by name and seed: A uniform within 1 / √(inputs), B zero."""
    match = PART.search(name)
    assert match is not None
    if match["side"] == "B":
        tensor.zero_()
    else:
        bound = 1 / math.sqrt(tensor.shape[1])
        tensor.uniform_(-bound, bound, generator=generator)
