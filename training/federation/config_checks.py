"""Find what cannot work in a federation's configuration, before anything is allocated; no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np

from training import contracts
from training.config.base import Problem
from training.config.shape import Misfit, Shape
from training.data import Labels
from training.federation import attackers, combinations, custom, data_division, parts
from training.federation.config import FederationConfig
from training.federation.parts import DataSplit

NOWHERE = Path(os.devnull)
EVEN = DataSplit(lambda labels, clients, rng, **options: np.arange(len(labels.by_split["train"])) % clients)
"""Stands in for a split that only the ranks can read, so that problems of every split are found here."""


def problems(config: FederationConfig, ranks: int) -> Iterator[Problem]:
    """Yield each problem with its field below [run], and the nearest setting that works."""
    for misfit in _misfits(config, ranks):
        yield Problem(misfit.field, str(misfit))


def _misfits(config: FederationConfig, ranks: int) -> Iterator[Misfit]:
    if config.per_round is not None and config.per_round > config.clients:
        yield Misfit("per_round", f"{config.per_round:,} are more than all {config.clients:,} clients. Write fewer.")
        return
    if ranks > config.selected:
        yield Misfit(
            "clients" if config.per_round is None else "per_round",
            ("1 client a round leaves" if config.selected == 1 else f"{config.selected:,} clients a round leave")
            + f" nothing to do for some of {ranks} ranks. Request fewer ranks.",
        )
    found = [
        *contracts.recipe(config.recipe).check(config, Shape({"dp": ranks})),
        *parts.algorithm(config.algorithm).check(config),
        *parts.aggregation(config.aggregation).check(config),
        *parts.selection(config.selection).check(config),
        *parts.split(config.split).check(config),
        *parts.pace(config.pace).check(config),
        *parts.learning_rate(config.client_lr_schedule).check(config),
        *attackers.check(config),
        *parts.attack(config.attack).check(config),
        *parts.adapters(config.adapters).check(config),
        *(misfit for name in config.filters for misfit in parts.filter_(name).check(config)),
        *combinations.check(config),
    ]
    yield from found
    if not found and (labels := shipped_labels(config)) is not None:
        split = EVEN if custom.SPLIT in config.custom else None
        yield from data_division.check(config, data_division.divide(config, labels, split))


def shipped_labels(config: FederationConfig) -> Labels | None:
    """Return the labels of data that come with the recipe; None if the data are known only inside the allocation."""
    recipe = contracts.recipe(config.recipe)
    if not recipe.SHIPPED:
        return None
    return _labels(config.recipe, tuple(sorted(config.recipe_options().items())))


@lru_cache(maxsize=16)
def _labels(name: str, options: tuple[tuple[str, object], ...]) -> Labels | None:
    recipe, given = contracts.recipe(name), dict(options)
    data = recipe.call_prepare(NOWHERE, None, given, report_progress=lambda *progress: None)  # type: ignore[arg-type]
    return recipe.call_labels(data.path, given)  # type: ignore[arg-type]
