"""Which choices of a federation go together, and why others don't. docs/federated.md is made of this.

What stands here is refused before anything is allocated. It goes by what modules say of themselves (SENT, IS_SUM, …),
so that one of somebody's own is judged like ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from training.config import choices
from training.config.shape import Misfit
from training.federation import filter_order, parts
from training.federation.config import FOLDERS, FederationConfig


@dataclass(frozen=True)
class Fact:
    """What may be true of one of a run's choices."""

    field: str
    words: str
    """It …"""
    holds: Callable[[FederationConfig], bool]


@dataclass(frozen=True)
class Contradiction:
    """Two choices that don't go together. The first is the one to change."""

    one: Fact
    other: Fact
    why: str
    remedy: str


def _says(field: str, config: FederationConfig, constant: str) -> object:
    """A constant of what is chosen, read without importing anything; None: it says nothing."""
    return choices.get(FOLDERS[field], getattr(config, field)).constants.get(constant)


def _sends_other(config: FederationConfig) -> bool:
    sent = _says("algorithm", config, "SENT")
    return isinstance(sent, dict) and set(sent) != {filter_order.UPDATE}


def _paces(config: FederationConfig) -> tuple[str, ...]:
    """Those that the algorithm is for; empty: any."""
    paces = _says("algorithm", config, "PACES")
    return paces if isinstance(paces, tuple) else ()


def _hides(config: FederationConfig) -> bool:
    return any(choices.get(FOLDERS["filters"], name).constants.get("SUM_ONLY") for name in config.filters)


SEES_EACH = Fact(
    "aggregation", "looks at each update by itself", lambda config: not _says("aggregation", config, "IS_SUM")
)
TRUSTS_ITSELF = Fact(
    "aggregation",
    "has the server train as a client would",
    lambda config: bool(_says("aggregation", config, "TRUSTED")),
)
SENDS_OTHER = Fact("algorithm", "sends something beside an update, or in its place", _sends_other)
KEEPS = Fact(
    "algorithm",
    "keeps something with each client from round to round",
    lambda config: parts.algorithm(config.algorithm).keeps,
)
ADDS_UP_KEPT = Fact(
    "algorithm",
    "has the server add up the very updates by which clients change what they keep",
    lambda config: bool(_says("algorithm", config, "ADDS_UP_KEPT")),
)
CHANGES_UPDATES = Fact("filters", "change an update on its way", lambda config: bool(config.filters))
HIDES = Fact("filters", "show the server nothing but the sum of all updates", _hides)
NEVER_WAITS = Fact("pace", "makes a model of the next few updates", lambda config: config.pace == "asynchronous")
IS_PARTICULAR = Fact("algorithm", "works at one pace only", lambda config: bool(_paces(config)))
IS_ANOTHER = Fact("pace", "has updates come in another way", lambda config: config.pace not in _paces(config))

HAS_MOMENTUM = Fact(
    "client_momentum",
    "lets each step of a client depend on its earlier ones",
    lambda config: config.client_momentum > 0,
)
TAKES_MEAN_GRADIENT = Fact(
    "algorithm",
    "takes an update for its steps' gradients, or has steps of its own kind",
    lambda config: _says("algorithm", config, "MOMENTUM") is False,
)
DECAYS = Fact("client_weight_decay", "is for steps of gradient descent", lambda config: config.client_weight_decay > 0)
STEPS_DIFFERENTLY = Fact(
    "algorithm",
    "has clients take steps of another kind, or none",
    lambda config: _says("algorithm", config, "WEIGHT_DECAY") is False,
)

FORGES = Fact(
    "attack",
    "replaces the updates of some clients",
    lambda config: _says("attack", config, "CHANGES_UPDATES") is not False,
)
COLLUDES = Fact(
    "attack", "is made of the other clients' updates", lambda config: bool(_says("attack", config, "COLLUDES"))
)

CONTRADICTIONS = (
    Contradiction(
        IS_ANOTHER,
        IS_PARTICULAR,
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
        ADDS_UP_KEPT,
        "Left out of the sum, a client would still have changed what it keeps.",
        'Write aggregation = "mean", or algorithm = "fedavg".',
    ),
    Contradiction(
        CHANGES_UPDATES,
        ADDS_UP_KEPT,
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
    """What of the run's choices contradicts another one: of each field the first that there is."""
    told = set()
    for row in CONTRADICTIONS:
        field = row.one.field
        if field not in told and row.one.holds(config) and row.other.holds(config):
            told.add(field)
            yield Misfit(field, _message(row, config))
    yield from filter_order.check(config)


def _message(row: Contradiction, config: FederationConfig) -> str:
    one, other = (_named(fact, config) for fact in (row.one, row.other))
    remedy = row.remedy.format(pace=next(iter(_paces(config)), ""))
    return f"{one} {row.one.words}, but {other} {row.other.words}. {row.why} {remedy}"


def _named(fact: Fact, config: FederationConfig) -> str:
    value = getattr(config, fact.field)
    if not isinstance(value, str | list):
        return f"{fact.field} = {value:g}"
    return ", ".join(f'"{name}"' for name in (value if isinstance(value, list) else [value]))


def table() -> Iterator[str]:
    """Lines of Markdown."""
    yield "| what | goes not with | because | instead |"
    yield "| --- | --- | --- | --- |"
    for row in CONTRADICTIONS:
        remedy = row.remedy.format(pace="…")
        yield f"| {row.one.field}: {row.one.words} | {row.other.field}: {row.other.words} | {row.why} | {remedy} |"
