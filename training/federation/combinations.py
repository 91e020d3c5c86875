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


def _hides(config: FederationConfig) -> bool:
    return any(choices.get(FOLDERS["filters"], name).constants.get("SUM_ONLY") for name in config.filters)


SEES_EACH = ChoiceProperty(
    "aggregation", "looks at each update by itself", lambda config: not _constant("aggregation", config, "IS_SUM")
)
TRUSTS_ITSELF = ChoiceProperty(
    "aggregation",
    "has the server train as a client would",
    lambda config: bool(_constant("aggregation", config, "TRUSTED")),
)
SENDS_OTHER = ChoiceProperty("algorithm", "sends something beside an update, or in its place", _sends_other)
KEEPS = ChoiceProperty(
    "algorithm",
    "keeps something with each client from round to round",
    lambda config: parts.algorithm(config.algorithm).keeps,
)
SUMS_CLIENT_STATE = ChoiceProperty(
    "algorithm",
    "has the server add up the very updates by which clients change what they keep",
    lambda config: bool(_constant("algorithm", config, "SUMS_CLIENT_STATE")),
)
CHANGES_UPDATES = ChoiceProperty("filters", "change an update on its way", lambda config: bool(config.filters))
HIDES = ChoiceProperty("filters", "show the server nothing but the sum of all updates", _hides)
NEVER_WAITS = ChoiceProperty(
    "pace", "makes a model of the next few updates", lambda config: config.pace == "asynchronous"
)
NEEDS_A_PACE = ChoiceProperty("algorithm", "works at one pace only", lambda config: bool(_paces(config)))
IS_OTHER_PACE = ChoiceProperty(
    "pace", "has updates come in another way", lambda config: config.pace not in _paces(config)
)

HAS_MOMENTUM = ChoiceProperty(
    "client_momentum",
    "lets each step of a client depend on its earlier ones",
    lambda config: config.client_momentum > 0,
)
TAKES_MEAN_GRADIENT = ChoiceProperty(
    "algorithm",
    "takes an update for its steps' gradients, or has steps of its own kind",
    lambda config: _constant("algorithm", config, "MOMENTUM") is False,
)
DECAYS = ChoiceProperty(
    "client_weight_decay", "is for steps of gradient descent", lambda config: config.client_weight_decay > 0
)
STEPS_DIFFERENTLY = ChoiceProperty(
    "algorithm",
    "has clients take steps of another kind, or none",
    lambda config: _constant("algorithm", config, "WEIGHT_DECAY") is False,
)

FORGES = ChoiceProperty(
    "attack",
    "replaces the updates of some clients",
    lambda config: _constant("attack", config, "CHANGES_UPDATES") is not False,
)
COLLUDES = ChoiceProperty(
    "attack", "is made of the other clients' updates", lambda config: bool(_constant("attack", config, "COLLUDES"))
)

CONTRADICTIONS = (
    Contradiction(
        IS_OTHER_PACE,
        NEEDS_A_PACE,
        "It counts on when updates come, and from which model.",
        'Write pace = "{pace}".',
    ),
    Contradiction(
        SEES_EACH,
        SENDS_OTHER,
        "Left out of one sum, a client would still be in the others.",
        'Write aggregation = "mean", or algorithm = "fedavg".',
    ),
    Contradiction(
        SEES_EACH,
        HIDES,
        "What nobody sees can't be compared.",
        'Write aggregation = "mean", or filters without it.',
    ),
    Contradiction(
        SEES_EACH,
        NEVER_WAITS,
        "A few updates, of models of different ages, are too few to tell bad ones by.",
        'Write aggregation = "mean", or pace = "deadline".',
    ),
    Contradiction(
        SEES_EACH,
        SUMS_CLIENT_STATE,
        "Left out of the sum, a client would still have changed what it keeps.",
        'Write aggregation = "mean", or algorithm = "fedavg".',
    ),
    Contradiction(
        CHANGES_UPDATES,
        SUMS_CLIENT_STATE,
        "The server's sum and what the clients keep would drift apart.",
        'Write filters = [], or algorithm = "scaffold".',
    ),
    Contradiction(
        TRUSTS_ITSELF,
        KEEPS,
        "The server is no client, and keeps no such thing.",
        'Write aggregation = "median", or algorithm = "fedavg".',
    ),
    Contradiction(
        FORGES,
        SENDS_OTHER,
        "What else it sends would stay honest, and no longer fit the update.",
        'Write attack = "label_flip", or algorithm = "fedavg".',
    ),
    Contradiction(
        COLLUDES,
        CHANGES_UPDATES,
        "Attackers would have to know what filters make of the others.",
        'Write filters = [], or attack = "sign_flip".',
    ),
    Contradiction(
        HAS_MOMENTUM,
        TAKES_MEAN_GRADIENT,
        "Its rule divides the update by the learning rate, or would ignore the momentum.",
        "Write client_momentum = 0.",
    ),
    Contradiction(
        DECAYS,
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


def _message(row: Contradiction, config: FederationConfig) -> str:
    first, second = (_named(fact, config) for fact in (row.first, row.second))
    remedy = row.remedy.format(pace=next(iter(_paces(config)), ""))
    return f"{first} {row.first.phrase}, but {second} {row.second.phrase}. {row.why} {remedy}"


def _named(fact: ChoiceProperty, config: FederationConfig) -> str:
    value = getattr(config, fact.field)
    if not isinstance(value, str | list):
        return f"{fact.field} = {value:g}"
    return ", ".join(f'"{name}"' for name in (value if isinstance(value, list) else [value]))


def markdown_list() -> Iterator[str]:
    """Yield the lines of the Markdown list in docs/reference/federated.md."""
    for row in CONTRADICTIONS:
        remedy = row.remedy.format(pace="…")
        first, second = (f"`{part.field}` ({part.phrase})" for part in (row.first, row.second))
        yield from choices.list_item(f"{first} with {second}: {row.why} {remedy}")
