"""The weights that a run's configuration names, and the sizes that come with them; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from training.config import asked
from training.config.asked import Asked, ConfigError
from training.contracts import Recipe
from training.corpus.errors import DataError

OPTION, NONE = "from_weights", "none"

C = TypeVar("C", bound=Asked)


def named(config: Asked) -> Path | None:
    """The weights that a run names; None: it starts from its seed."""
    value = config.recipe_options().get(OPTION)
    return Path(value).expanduser() if isinstance(value, str) and value != NONE else None


def settled(recipe: Recipe, config: C, copy: Path | None = None) -> C:
    """The configuration with the sizes of the weights that it names, if any; `copy`: where else they lie.

    DataError, naming the field, where they are not there, or not such.
    """
    weights = named(config)
    if weights is None:
        return config
    try:
        return with_options(config, recipe.settle(copy or weights, **config.recipe_options()))
    except DataError as error:
        raise error.within(f"run.{config.recipe}") from None


def with_options(config: C, options: Mapping[str, object]) -> C:
    """The configuration with other options of its recipe."""
    try:
        return type(config).model_validate({**config.model_dump(), config.recipe: options})
    except ValidationError as error:
        raise ConfigError(asked.problems(error, type(config))) from error
