"""The weights that a run's configuration names, and the sizes that come with them; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from training.config import base
from training.config.base import BaseRunConfig, ConfigError
from training.contracts import Recipe
from training.corpus.errors import DataError

OPTION, NONE = "from_weights", "none"

C = TypeVar("C", bound=BaseRunConfig)


def weights_path(config: BaseRunConfig) -> Path | None:
    """Return the path of the weights that a run names; None: it starts from its seed."""
    value = config.recipe_options().get(OPTION)
    return Path(value).expanduser() if isinstance(value, str) and value != NONE else None


def with_sizes(recipe: Recipe, config: C, copy: Path | None = None) -> C:
    """Return the configuration with the sizes of the weights that it names, if any; `copy`: read them there instead.

    Raises DataError, naming the field, if they are missing or unsuitable.
    """
    weights = weights_path(config)
    if weights is None:
        return config
    try:
        return with_options(config, recipe.resolve_options(copy or weights, **config.recipe_options()))
    except DataError as error:
        raise error.within(f"run.{config.recipe}") from None


def with_options(config: C, options: Mapping[str, object]) -> C:
    """Return the configuration with other options of its recipe."""
    try:
        return type(config).model_validate({**config.model_dump(), config.recipe: options})
    except ValidationError as error:
        raise ConfigError(base.problems(error, type(config))) from error
