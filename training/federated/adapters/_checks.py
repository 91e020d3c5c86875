"""Check the settings of adapters, without opening a file."""

from __future__ import annotations

from collections.abc import Iterator

from training.config import choices
from training.config.shape import Misfit
from training.federation.config import FederationConfig


def check_place(config: FederationConfig) -> Iterator[Misfit]:
    """Yield a misfit if the recipe's model does not support these adapters."""
    supported = choices.get("recipes", config.recipe).constants.get("ADAPTERS", ())
    if not isinstance(supported, tuple) or config.adapters not in supported:
        message = f'is "{config.adapters}", but the model of {config.recipe} does not support it. Write "none".'
        yield Misfit("adapters", message)


def check_lora(config: FederationConfig) -> Iterator[Misfit]:
    """Yield what is wrong with LoRA adapters. Their own options are the recipe's, which checks them."""
    found = list(check_place(config))
    yield from found
    if not found and not config.recipe_options().get("lora_rank"):
        yield Misfit(
            f"{config.recipe}.lora_rank",
            f'is 0, but adapters = "{config.adapters}". Write a rank, such as 8, or adapters = "none".',
        )
