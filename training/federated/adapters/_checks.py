"""What adapters can't work with, known without opening a file."""

from __future__ import annotations

from collections.abc import Iterator

from training.config import choices
from training.config.shape import Misfit
from training.federation.config import FederationConfig


def check_place(config: FederationConfig) -> Iterator[Misfit]:
    """The recipe's model must have a place for them."""
    known = choices.get("recipes", config.recipe).constants.get("ADAPTERS", ())
    if not isinstance(known, tuple) or config.adapters not in known:
        message = f'is "{config.adapters}", but the model of {config.recipe} has no place for it. Write "none".'
        yield Misfit("adapters", message)


def check_lora(config: FederationConfig) -> Iterator[Misfit]:
    """What they are is said by the recipe's options, which are checked there."""
    found = list(check_place(config))
    yield from found
    if not found and not config.recipe_options().get("lora_rank"):
        yield Misfit(
            f"{config.recipe}.lora_rank",
            f'is 0, but adapters = "{config.adapters}". Write a rank, such as 8, or adapters = "none".',
        )
