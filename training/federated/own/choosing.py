"""A federation's recipe and algorithm: Vigil's own, or somebody's files in their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from training import contracts
from training.config.asked import ConfigError, Problem
from training.contracts import Recipe
from training.federated.own.client import OwnClient
from training.federated.own.program import Functions, Program
from training.federation import parts
from training.federation.config import OWN_ALGORITHM, FederationConfig
from training.federation.filter_order import UPDATE
from training.federation.parts import Algorithm


def recipe(config: FederationConfig, program: Program | None) -> Recipe:
    found = contracts.recipe(config.recipe)
    if not found.OWN:
        return found
    return found.of(OwnClient(_needed(program), clients=config.clients, options=config.recipe_options()))


def algorithm(config: FederationConfig, program: Program | None) -> Algorithm:
    """Where a file of one's own says nothing of what clients do, they do and send as FedAvg's."""
    usual = parts.algorithm(config.algorithm)
    if config.algorithm != OWN_ALGORITHM:
        return usual
    names = [field.name for field in fields(Algorithm)]
    functions = Functions(
        _needed(program), "algorithm", names=names, needed=("aggregate",), options=config.options_of(OWN_ALGORITHM)
    )
    own = {name: _given_options(functions, name) for name in names if name in functions}
    said = {name: getattr(functions.module, name) for name in names if hasattr(functions.module, name)}
    if "train" in said and "SENT" not in said:
        text = f'{functions.file} has train(), but does not say what it sends: SENT = {{"delta": "samples"}}.'
        raise ConfigError([Problem("client.algorithm", text)])
    _check_sent(config, said.get("SENT", usual.SENT))
    return replace(usual, **{**said, **own})


def _check_sent(config: FederationConfig, sent: Mapping[str, str]) -> None:
    """What federation.combinations asks of every algorithm, where what it sends is only known here."""
    names = ", ".join(sent)
    if config.filters and UPDATE not in sent:
        text = f"work on an update called {UPDATE}, but {OWN_ALGORITHM} sends {names}. Write filters = []."
        raise ConfigError([Problem("run.filters", text)])
    if set(sent) != {UPDATE} and not parts.aggregation(config.aggregation).IS_SUM:
        text = f'is "{config.aggregation}", which takes one update of each client, but they send {names}. Write "mean".'
        raise ConfigError([Problem("run.aggregation", text)])


def _given_options(functions: Functions, name: str) -> Any:
    return lambda *given, **options: functions.call(name, *given)


def _needed(program: Program | None) -> Program:
    if program is None:
        raise ConfigError([Problem("client", 'is missing. Write a table [client] with directory = ".".')])
    return program
