"""The weights that a run's configuration names, and the sizes that come with them; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from training.config import run_config
from training.config.run_config import RunConfig
from training.contracts import Recipe
from training.corpus.errors import DataError

OPTION, NONE = "from_weights", "none"


def named(config: RunConfig) -> Path | None:
    """The weights that a run names; None: it starts from its seed."""
    value = config.recipe_options().get(OPTION)
    return Path(value).expanduser() if isinstance(value, str) and value != NONE else None


def settled(recipe: Recipe, config: RunConfig, copy: Path | None = None) -> RunConfig:
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


def with_options(config: RunConfig, options: Mapping[str, object]) -> RunConfig:
    """The configuration with other options of its recipe."""
    return run_config.parse({**config.model_dump(), config.recipe: options})
