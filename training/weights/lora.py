"""LoRA (Hu et al., 2021, arXiv 2106.09685): small matrices beside frozen ones, by the package peft.

A matrix W becomes W + alpha / rank · B·A. A begins random and B as zeros, so that a run begins exactly at the weights
it starts from. Only A and B are trained, averaged over ranks, in the gradient's norm and in checkpoints; the weights
they belong to lie once beside the checkpoints (training.weights.base).
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

    from training.config.asked import Asked
    from training.config.run_config import RunConfig
    from training.config.shape import Shape
    from training.federation.config import FederationConfig

TARGETS = ("query", "key", "value", "out", "gate", "up", "down")
ALL = "all"
NAME = "default"
"""peft's for the only adapter."""
PART = re.compile(rf"\.lora_(?P<side>[AB])\.{NAME}\.weight$")
PARALLELISMS = ("ddp", "fsdp")
FEDERATED = ("lora", "ffa_lora")
"""Of a federation's adapters those that these are."""


@dataclass(frozen=True)
class Lora:
    """The adapters that a run asks for."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]

    @classmethod
    def of(cls, rank: int, alpha: float | None, dropout: float, targets: str) -> Lora:
        words = tuple(dict.fromkeys(targets.replace(",", " ").split()))
        return cls(rank, alpha or 2.0 * rank, dropout, TARGETS if words == (ALL,) else words)

    @classmethod
    def told(cls, options: Mapping[str, Any]) -> Lora | None:
        """The adapters that a run's options tell; None: all weights are trained."""
        if not options.get("lora_rank"):
            return None
        return cls.of(
            options["lora_rank"],
            options.get("lora_alpha"),
            options.get("lora_dropout", 0.0),
            options.get("lora_targets", "query value"),
        )

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def problems(config: Asked, shape: Shape) -> Iterator[tuple[str, str]]:
    """(field below [run], what is wrong and the fix): what no test has tried with adapters is refused."""
    from training.config.run_config import RunConfig
    from training.federation.config import FederationConfig

    options = config.recipe_options()
    lora = Lora.told(options)
    assert lora is not None
    table = config.recipe
    if options.get("from_weights", "none") == "none":
        yield f"{table}.lora_rank", "needs weights that are already trained. Name some in from_weights, or write 0."
    known = f"Write some of {', '.join(TARGETS)}, or {ALL}."
    if not lora.targets:
        yield f"{table}.lora_targets", f"names nothing. {known}"
    elif odd := next((word for word in lora.targets if word not in TARGETS), None):
        yield f"{table}.lora_targets", f'"{odd}" is no matrix of a block. {known}'
    if isinstance(config, RunConfig):
        yield from _of_trainer(config, shape)
    if isinstance(config, FederationConfig):
        yield from _of_federation(config)


def _of_trainer(config: RunConfig, shape: Shape) -> Iterator[tuple[str, str]]:
    if config.parallelism not in PARALLELISMS:
        names = " or ".join(f'"{name}"' for name in PARALLELISMS)
        yield "parallelism", f"{config.parallelism} has not been tried with adapters. Write {names}."
    for axis in ("pp", "cp", "tp"):
        if shape[axis] > 1:
            yield f"mesh.{axis}", "has not been tried with adapters. Leave it out: dp and shard do."
    if config.communication != "plain":
        message = f'{config.communication} has not been tried with adapters, which are small. Write "plain".'
        yield "communication", message
    if config.dtype == "fp8":
        yield "dtype", 'is "fp8", which has not been tried with adapters. Write "bf16".'


def _of_federation(config: FederationConfig) -> Iterator[tuple[str, str]]:
    """What travels is said in one place: a rank alone makes no adapters."""
    if config.adapters not in FEDERATED:
        names = " or ".join(f'"{name}"' for name in FEDERATED)
        yield "adapters", f'is "{config.adapters}", but lora_rank asks for LoRA. Write {names}, or lora_rank = 0.'


def add(model: nn.Module, lora: Lora) -> None:
    """Puts adapters without memory beside the model's matrices, and freezes all else; names of blocks stay."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        message = "needs the package peft, which the job's Python does not have. Install it there (pip install peft)."
        raise DataError(message, "lora_rank") from None
    wanted = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # any number: it is only divided by the rank
        lora_dropout=lora.dropout,
        target_modules=list(lora.targets),
        bias="none",
    )
    inject_adapter_in_model(wanted, model, adapter_name=NAME, low_cpu_mem_usage=True)


def is_part_of_one(name: str) -> bool:
    """Whether a parameter of this name is part of an adapter."""
    return PART.search(name) is not None


def base_name(name: str) -> str:
    """What the parameter beside an adapter is called in a model without."""
    return name.replace(".base_layer.", ".")


def initialise(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Fills an adapter's part as peft does, but by name and seed: A evenly within 1 / √(what enters), B zero."""
    found = PART.search(name)
    assert found is not None
    if found["side"] == "B":
        tensor.zero_()
    else:
        bound = 1 / math.sqrt(tensor.shape[1])
        tensor.uniform_(-bound, bound, generator=generator)
