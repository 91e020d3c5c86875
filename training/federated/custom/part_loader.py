"""Load a federation's recipe, algorithm, aggregation, selection and split: Vigil's, or a user's files instead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from training import contracts
from training.config.base import ConfigError, Problem
from training.contracts import Recipe
from training.federated.custom import aggregation as custom_aggregation
from training.federated.custom import selection as custom_selection
from training.federated.custom import split as custom_split
from training.federated.custom.client import CustomClient
from training.federated.custom.user_code import UserCode, UserFunctions
from training.federation import custom, parts
from training.federation.config import FederationConfig
from training.federation.filter_order import UPDATE
from training.federation.parts import Aggregation, Algorithm, DataSplit, Selection
from training.runtime.distributed import World

if TYPE_CHECKING:
    from training.federated.server import ServerRound


DEPRECATED = {
    "begin": "initial_client_state",
    "equip": "extend_model",
    "memory": "initial_server_state",
    "own": "personalized_model",
    "play": "run_round",
    "HEAD": "NEEDS_HEAD",
    "JUDGES_BOTH": "EVALUATES_SERVER_MODEL",
    "MOMENTUM": "ALLOWS_MOMENTUM",
    "PARTIAL": "ACCEPTS_PARTIAL_WORK",
    "STEPS": "TAKES_STEPS",
    "OWNS": "NEEDS_PERSONAL_TENSORS",
    "WEIGHT_DECAY": "ALLOWS_WEIGHT_DECAY",
    "WHOLE": "USES_ALL_SAMPLES",
}
"""Names of functions and constants of algorithm.py that earlier releases used, with those that replace them."""


def load_recipe(config: FederationConfig, user_code: UserCode | None) -> Recipe:
    found = contracts.recipe(config.recipe)
    if not found.TAKES_CLIENT_CODE:
        return found
    return found.bind_client_code(
        CustomClient(_required_user_code(user_code), clients=config.clients, options=config.recipe_options())
    )


def load_algorithm(config: FederationConfig, user_code: UserCode | None) -> Algorithm:
    """Return the run's algorithm. What a user's file does not define is FedAvg's: clients train and send as there."""
    defaults = parts.algorithm(config.algorithm)
    if custom.ALGORITHM not in config.custom:
        return defaults
    names = [*DEPRECATED, *(field.name for field in fields(Algorithm))]  # in this order, so that a current name wins
    options = config.options_of(custom.ALGORITHM.choice)
    functions = UserFunctions(_required_user_code(user_code), "algorithm", names=names, required=(), options=options)
    functions_by_name = {_current(name): _with_options(functions, name) for name in names if name in functions}
    if not functions_by_name.keys() & {"aggregate", "run_round"}:
        text = f"{functions.file} defines neither aggregate() nor run_round(). Write one."
        raise ConfigError([Problem("client.algorithm", text)])
    constants = {_current(name): getattr(functions.module, name) for name in names if hasattr(functions.module, name)}
    sent = constants.get("SENT", defaults.SENT)
    if not isinstance(sent, Mapping) or not set(sent.values()) <= {"samples", "clients"}:
        text = f'{functions.file} has SENT = {sent!r:.100}. Write what is sent by name, each "samples" or "clients".'
        raise ConfigError([Problem("client.algorithm", text)])
    if "train" in constants and "SENT" not in constants:
        text = f'{functions.file} has train(), but does not say what it sends: SENT = {{"delta": "samples"}}.'
        raise ConfigError([Problem("client.algorithm", text)])
    _check_sent(config, sent)
    return replace(defaults, **{**constants, **functions_by_name})


def load_aggregation(config: FederationConfig, user_code: UserCode | None) -> Aggregation:
    """Return the run's aggregation rule."""
    if custom.AGGREGATION not in config.custom:
        return parts.aggregation(config.aggregation)
    return custom_aggregation.load(config, _required_user_code(user_code))


def load_selection(config: FederationConfig, user_code: UserCode | None, world: World) -> Selection:
    """Return the run's selection."""
    if custom.SELECTION not in config.custom:
        return parts.selection(config.selection)
    return custom_selection.load(config, _required_user_code(user_code), world)


def load_split(config: FederationConfig, user_code: UserCode | None, world: World) -> DataSplit:
    """Return the run's split."""
    if custom.SPLIT not in config.custom:
        return parts.split(config.split)
    return custom_split.load(config, _required_user_code(user_code), world)


def _current(name: str) -> str:
    return DEPRECATED.get(name, name)


def _check_sent(config: FederationConfig, sent: Mapping[str, str]) -> None:
    """Check what federation.combinations checks of other algorithms: what this one sends is known only here."""
    names = ", ".join(sent)
    if config.filters and UPDATE not in sent:
        text = f"work on an update called {UPDATE}, but {custom.ALGORITHM.choice} sends {names}. Write filters = []."
        raise ConfigError([Problem("run.filters", text)])
    if set(sent) != {UPDATE} and parts.attack(config.attack).CHANGES_UPDATES:
        text = f'is "{config.attack}", which replaces an update called {UPDATE} and nothing else, but'
        text += f' {custom.ALGORITHM.choice} sends {names}. Write "label_flip".'
        raise ConfigError([Problem("run.attack", text)])
    if set(sent) != {UPDATE} and not parts.aggregation(config.aggregation).IS_SUM:
        text = f'is "{config.aggregation}", which takes one update of each client, but they send {names}. Write "mean".'
        raise ConfigError([Problem("run.aggregation", text)])


def _with_options(functions: UserFunctions, name: str) -> Any:
    """Return the function with its options bound, and its result checked if it becomes part of a model or a state."""
    check = _RESULT_CHECKS.get(_current(name))

    def called(*given: Any, **options: object) -> Any:
        found = functions.call(name, *given)
        if check is not None:
            check(f"{name}() of {functions.file}", found, *given)
        return found

    def next_model(given: Any, memory: dict[str, Tensor], model: Tensor) -> Tensor:
        before = {what: value.shape for what, value in memory.items()}
        found: Tensor = called(given)
        _check_model(f"{name}() of {functions.file}", found, model)
        _check_memory(f"{name}() of {functions.file}", memory, before)
        # A tensor from expand() has one place for several numbers, and cannot be written to.
        memory.update({what: value.contiguous() for what, value in memory.items()})
        return found.to(model)

    def aggregate(server: ServerRound, **options: object) -> Tensor:
        return next_model(server, server.memory, server.model)

    def run_round(controller: Any, **options: object) -> Tensor:
        return next_model(controller, controller.server.memory, controller.server.shared)

    replacements: dict[str, Any] = {"aggregate": aggregate, "run_round": run_round}
    return replacements.get(_current(name), called)


def _check_model(what: str, found: Any, model: Tensor) -> None:
    if not isinstance(found, Tensor) or found.shape != model.shape:
        returned = f"tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise TypeError(f"{what} returns a {returned}, not the next model: {len(model):,} parameters in a vector")


def _check_tensors(what: str, found: Any, *given: Any) -> None:
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise TypeError(f"{what} returns a {type(found).__name__}, not a dict of tensors by name")


_RESULT_CHECKS = dict.fromkeys(("train", "initial_client_state", "initial_server_state"), _check_tensors)


def _check_memory(what: str, memory: Mapping[str, Any], before: Mapping[str, Any]) -> None:
    """Raise TypeError if a function adds, removes or reshapes an entry: checkpoints have room for the first ones."""
    after = {name: value.shape if isinstance(value, Tensor) else type(value).__name__ for name, value in memory.items()}
    if wrong := [name for name in {**before, **after} if before.get(name) != after.get(name)]:
        was, is_ = before.get(wrong[0], "not there"), after.get(wrong[0], "not there")
        raise TypeError(f"{what} left server.memory[{wrong[0]!r}] as {is_}, and it was {was}")


def _required_user_code(user_code: UserCode | None) -> UserCode:
    if user_code is None:
        raise ConfigError([Problem("client", 'is missing. Write a table [client] with directory = ".".')])
    return user_code
