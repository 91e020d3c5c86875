"""Refuse choices of a federation that contradict each other, before anything is allocated.

The rules depend on the constants of modules (SENT, IS_SUM, …), so that they apply to users' modules as well. The list
in docs/reference/federated.md is generated from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from training.config import choices
from training.config.shape import Misfit
from training.federation import filter_order, parts
from training.federation.config import FOLDERS, FederationConfig


@dataclass(frozen=True)
class ChoiceProperty:
    """A property that one of a run's choices may have."""

    field: str
    phrase: str
    """The property as a predicate: "looks at each update"."""
    holds: Callable[[FederationConfig], bool]


@dataclass(frozen=True)
class Contradiction:
    """Two properties that exclude each other. The message is about the first one's field."""

    first: ChoiceProperty
    second: ChoiceProperty
    why: str
    remedy: str


def _constant(field: str, config: FederationConfig, constant: str) -> object:
    """Return a constant of the chosen module, read without importing it; None if it does not define it."""
    return choices.get(FOLDERS[field], getattr(config, field)).constants.get(constant)


def _sends_other(config: FederationConfig) -> bool:
    sent = _constant("algorithm", config, "SENT")
    return isinstance(sent, dict) and set(sent) != {filter_order.UPDATE}


def _paces(config: FederationConfig) -> tuple[str, ...]:
    """Return the paces that the algorithm supports; empty: all."""
    paces = _constant("algorithm", config, "PACES")
    return paces if isinstance(paces, tuple) else ()


def _hides_single_updates(config: FederationConfig) -> bool:
    return any(choices.get(FOLDERS["filters"], name).constants.get("SUM_ONLY") for name in config.filters)


NEEDS_SINGLE_UPDATES = ChoiceProperty(
    "aggregation", "needs each update separately", lambda config: not _constant("aggregation", config, "IS_SUM")
)
TRAINS_ON_SERVER = ChoiceProperty(
    "aggregation",
    "trains a reference update on the server",
    lambda config: bool(_constant("aggregation", config, "TRUSTED")),
)
SENDS_OTHER = ChoiceProperty("algorithm", "sends something other than one update", _sends_other)
HAS_CLIENT_STATE = ChoiceProperty(
    "algorithm",
    "stores state for each client between rounds",
    lambda config: parts.algorithm(config.algorithm).has_client_state,
)
SUMS_CLIENT_STATE = ChoiceProperty(
    "algorithm",
    "sums the updates by which clients change their stored state",
    lambda config: bool(_constant("algorithm", config, "SUMS_CLIENT_STATE")),
)
CHANGES_UPDATES = ChoiceProperty("filters", "modify updates in transit", lambda config: bool(config.filters))
HIDES_SINGLE_UPDATES = ChoiceProperty(
    "filters", "reveal only the sum of all updates to the server", _hides_single_updates
)
NEVER_WAITS = ChoiceProperty(
    "pace", "aggregates every few updates as they arrive", lambda config: config.pace == "asynchronous"
)
NEEDS_A_PACE = ChoiceProperty("algorithm", "works with one pace only", lambda config: bool(_paces(config)))
IS_OTHER_PACE = ChoiceProperty(
    "pace", "delivers updates in another way", lambda config: config.pace not in _paces(config)
)

HAS_MOMENTUM = ChoiceProperty(
    "client_momentum",
    "makes each step of a client depend on earlier ones",
    lambda config: config.client_momentum > 0,
)
TAKES_MEAN_GRADIENT = ChoiceProperty(
    "algorithm",
    "treats an update as its steps' mean gradient, or defines its own steps",
    lambda config: _constant("algorithm", config, "ALLOWS_MOMENTUM") is False,
)
HAS_WEIGHT_DECAY = ChoiceProperty(
    "client_weight_decay", "applies to steps of gradient descent", lambda config: config.client_weight_decay > 0
)
STEPS_DIFFERENTLY = ChoiceProperty(
    "algorithm",
    "has clients take other kinds of steps, or none",
    lambda config: _constant("algorithm", config, "ALLOWS_WEIGHT_DECAY") is False,
)

REPLACES_UPDATES = ChoiceProperty(
    "attack",
    "replaces the updates of some clients",
    lambda config: _constant("attack", config, "CHANGES_UPDATES") is not False,
)
COLLUDES = ChoiceProperty(
    "attack", "is computed from other clients' updates", lambda config: bool(_constant("attack", config, "COLLUDES"))
)

CONTRADICTIONS = (
    Contradiction(
        IS_OTHER_PACE,
        NEEDS_A_PACE,
        "It depends on when updates arrive and which model they started from.",
        'Write pace = "{pace}".',
    ),
    Contradiction(
        NEEDS_SINGLE_UPDATES,
        SENDS_OTHER,
        "A client excluded from one sum would still be in the others.",
        'Write aggregation = "mean", or algorithm = "fedavg".',
    ),
    Contradiction(
        NEEDS_SINGLE_UPDATES,
        HIDES_SINGLE_UPDATES,
        "Updates that the server cannot see cannot be compared.",
        'Write aggregation = "mean", or filters without it.',
    ),
    Contradiction(
        NEEDS_SINGLE_UPDATES,
        NEVER_WAITS,
        "A few updates from models of different ages are too few to detect bad ones.",
        'Write aggregation = "mean", or pace = "deadline".',
    ),
    Contradiction(
        NEEDS_SINGLE_UPDATES,
        SUMS_CLIENT_STATE,
        "A client excluded from the sum would still have changed its stored state.",
        'Write aggregation = "mean", or algorithm = "fedavg".',
    ),
    Contradiction(
        CHANGES_UPDATES,
        SUMS_CLIENT_STATE,
        "The server's sum and the clients' stored state would drift apart.",
        'Write filters = [], or algorithm = "scaffold".',
    ),
    Contradiction(
        TRAINS_ON_SERVER,
        HAS_CLIENT_STATE,
        "The server is not a client and stores no such state.",
        'Write aggregation = "median", or algorithm = "fedavg".',
    ),
    Contradiction(
        REPLACES_UPDATES,
        SENDS_OTHER,
        "The other values that it sends would stay honest and no longer match the update.",
        'Write attack = "label_flip", or algorithm = "fedavg".',
    ),
    Contradiction(
        COLLUDES,
        CHANGES_UPDATES,
        "Attackers would have to know how filters change the other updates.",
        'Write filters = [], or attack = "sign_flip".',
    ),
    Contradiction(
        HAS_MOMENTUM,
        TAKES_MEAN_GRADIENT,
        "Its rule divides the update by the learning rate, or would ignore the momentum.",
        "Write client_momentum = 0.",
    ),
    Contradiction(
        HAS_WEIGHT_DECAY,
        STEPS_DIFFERENTLY,
        "It would be ignored.",
        "Write client_weight_decay = 0, or a ridge.",
    ),
)


def check(config: FederationConfig) -> Iterator[Misfit]:
    """Yield the contradictions between the run's choices, at most one for each field."""
    reported = set()
    for row in CONTRADICTIONS:
        field = row.first.field
        if field not in reported and row.first.holds(config) and row.second.holds(config):
            reported.add(field)
            yield Misfit(field, _message(row, config))
    yield from filter_order.check(config)


def _message(contradiction: Contradiction, config: FederationConfig) -> str:
    first, second = contradiction.first, contradiction.second
    remedy = contradiction.remedy.format(pace=next(iter(_paces(config)), ""))
    both = f"{_named(first, config)} {first.phrase}, but {_named(second, config)} {second.phrase}."
    return f"{both} {contradiction.why} {remedy}"


def _named(choice_property: ChoiceProperty, config: FederationConfig) -> str:
    value = getattr(config, choice_property.field)
    if not isinstance(value, str | list):
        return f"{choice_property.field} = {value:g}"
    return ", ".join(f'"{name}"' for name in (value if isinstance(value, list) else [value]))


def markdown_list() -> Iterator[str]:
    """Yield the lines of the Markdown list in docs/reference/federated.md."""
    for row in CONTRADICTIONS:
        remedy = row.remedy.format(pace="…")
        first, second = (f"`{part.field}` ({part.phrase})" for part in (row.first, row.second))
        yield from choices.list_item(f"{first} with {second}: {row.why} {remedy}")
