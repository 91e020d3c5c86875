"""What a federation's page draws and says of rounds and clients. Pure; jobs.gathering.federation asks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jobs.client_name import called
from training.federation.tables import STATES
from vigil_core import formatting

if TYPE_CHECKING:
    from jobs.models import Client, Round

LOOKED_BACK = 30
"""Rounds that the sentence is about."""
LEAST = 3
"""Times that something happened before it is told of a client …"""
OFTEN = 0.25
"""… and the part of its rounds."""
COLOURS = 9
"""Labels that are told apart in a bar; the last stands for the rest."""
_HAPPENED = {
    "rejected": "has been rejected in {k} of its last {m} rounds",
    "broken": "sent no numbers in {k} of its last {m} rounds",
    "dropped": "dropped out of {k} of its last {m} rounds",
    "late": "came late in {k} of its last {m} rounds",
}
_LOOKS = {"rejected": "failed", "broken": "failed", "dropped": "cancelled", "late": "timeout"}
"""The state whose colour a client in such trouble has."""


@dataclass(frozen=True)
class Share:
    """A piece of a bar of samples, in per cent of the largest client's; `color` 0 to 8."""

    color: int
    x: float
    width: float


@dataclass(frozen=True, kw_only=True)
class ClientRow:
    """A client's line: what is known of it, and how it is drawn."""

    client: Client
    trouble: str
    """ "late 21×"; "" where it is hardly ever in any."""
    look: str
    x: float | None
    """Of its accuracy (or loss) on the axis, in per cent."""
    value: float | None
    shares: list[Share]
    told: str
    """The bar in words."""


@dataclass(frozen=True, kw_only=True)
class Fairness:
    """For whom the model is how good. `low` and `high` are the ends of the axis; `line`: where the global model is."""

    measure: str
    rows: list[ClientRow]
    low: float
    high: float
    line: float | None
    labels: list[str]
    is_timed: bool
    """Whether seconds are known of any client: those that are computed together have none of their own."""


@dataclass(frozen=True, kw_only=True)
class Straggler:
    """`times`: of the median client; `width`: of the slowest, in per cent."""

    client: Client
    times: float | None
    width: float


def matrix(
    window: Sequence[Round],
    cells: Sequence[Sequence[int]],
    clients: Sequence[tuple[int, Client | None]],
    *,
    first: int,
    columns: int,
    done: int,
    total: int,
) -> dict[str, Any]:
    """What the script draws: a row a client, a column a round; a cell is a state's number, −1: nothing is known.
    What stands at a row's end counts its cells.
    """
    rows = [_cells_of(number, client, values) for (number, client), values in zip(clients, cells, strict=True)]
    accuracies = {row.number - first: formatting.loss(row.accuracy) for row in window if row.accuracy is not None}
    return {
        "rows": rows,
        "states": STATES,
        "first": first,
        "columns": columns,
        "done": done,
        "total": total,
        "accuracy": accuracies,
    }


def _cells_of(number: int, client: Client | None, values: Sequence[int]) -> dict[str, Any]:
    owner = client.name if client else ""
    times = {state: values.count(i) for i, state in enumerate(STATES)}
    trouble = _most(times)
    return {
        "name": called(number, owner),
        "short": str(number),
        "owner": owner,
        "note": trouble or _part_of(times),
        "odd": bool(trouble),
        "values": list(values),
    }


def trouble_of(client: Client) -> str:
    """What has happened to it most, where that is more than now and then."""
    return _most({state: int(getattr(client, state)) for state in STATES})


def _most(times: Mapping[str, int]) -> str:
    worst = max(_HAPPENED, key=lambda state: times[state])
    often = times[worst] >= LEAST and times[worst] >= 0.05 * sum(times.values())
    return f"{worst} {formatting.count(times[worst])}×" if often else ""


def _part_of(times: Mapping[str, int]) -> str:
    """How often its update counted, of the times that it was asked."""
    asked = sum(times.values())
    return formatting.share((times["trained"] + times["late"]) / asked) if asked else ""


def misbehaves(
    did: Mapping[int, Sequence[int]], names: Mapping[int, str], *, fine: frozenset[str] = frozenset()
) -> str:
    """A sentence on the client that is worst off; `did`: by client the states of its newest rounds; `fine`: those
    that are as they are meant.
    """
    found = []
    for client, states in did.items():
        for rank, state in enumerate(_HAPPENED):
            times = 0 if state in fine else sum(one == STATES.index(state) for one in states)
            if times >= LEAST and times >= OFTEN * len(states):
                found.append((-rank, times, -client, state, len(states)))
    if not found:
        return ""
    _, times, client, state, of = max(found)
    more = len({one[2] for one in found}) - 1
    others = f" {formatting.plural(more, 'more client is', 'more clients are')} in trouble." if more else ""
    who = called(-client, names.get(-client, ""))
    return f"C{who[1:]} {_HAPPENED[state].format(k=times, m=of)}.{others}"


def fairness(
    clients: Sequence[Client],
    split: Mapping[int, Sequence[int]],
    labels: Sequence[str],
    *,
    measure: str,
    ends: tuple[float, float],
    line: float | None,
    most_samples: int,
    is_timed: bool,
) -> Fairness:
    """`ends`: the lowest and the highest value of all clients; `line`: the global model's."""
    low, high = _around(*ends, line, whole=measure == "accuracy")
    rows = [_row(one, split.get(one.number), labels, getattr(one, measure), low, high, most_samples) for one in clients]
    at = _on(line, low, high)
    return Fairness(measure=measure, rows=rows, low=low, high=high, line=at, labels=legend(labels), is_timed=is_timed)


def stragglers(clients: Sequence[Client], median: float | None) -> list[Straggler]:
    """The slowest first, as they come."""
    most = max((client.seconds or 0.0 for client in clients), default=0.0)
    return [
        Straggler(
            client=client,
            times=client.seconds / median if median and client.seconds is not None else None,
            width=round(100 * (client.seconds or 0.0) / most, 2) if most else 0.0,
        )
        for client in clients
    ]


def _row(
    client: Client,
    counts: Sequence[int] | None,
    labels: Sequence[str],
    value: float | None,
    low: float,
    high: float,
    most: int,
) -> ClientRow:
    trouble = trouble_of(client)
    return ClientRow(
        client=client,
        trouble=trouble,
        look=_LOOKS.get(trouble.partition(" ")[0], "running"),
        x=_on(value, low, high),
        value=value,
        shares=shares(counts or [], max(1, most)),
        told=in_words(counts or [], labels) or f"{formatting.count(client.samples)} samples",
    )


def shares(counts: Sequence[int], most: int) -> list[Share]:
    """A client's bar, of counts by label."""
    kept = list(counts[: COLOURS - 1]) + ([sum(counts[COLOURS - 1 :])] if len(counts) >= COLOURS else [])
    found, x = [], 0.0
    for color, count in enumerate(kept, first_colour(kept)):
        width = 100 * count / most
        if count:
            found.append(Share(color, round(x, 3), round(width, 3)))
        x += width
    return found


def first_colour(counts: Sequence[int]) -> int:
    """Grey is for the first of several labels."""
    return 1 if len(counts) == 1 else 0


def in_words(counts: Sequence[int], labels: Sequence[str]) -> str:
    """The same to be read."""
    told = [f"{label} {formatting.count(count)}" for label, count in zip(labels, counts, strict=False) if count]
    return ", ".join(told[:12]) + (f" and {len(told) - 12} more labels" if len(told) > 12 else "")


def legend(labels: Sequence[str]) -> list[str]:
    """What each colour stands for; nothing where there is but one."""
    shown, beyond = list(labels[: COLOURS - 1]), labels[COLOURS - 1 :]
    if len(labels) < 2:
        return []
    return shown if not beyond else [*shown, *(beyond if len(beyond) == 1 else [f"{len(beyond)} others"])]


def _around(low: float, high: float, line: float | None, *, whole: bool) -> tuple[float, float]:
    """Round ends for an axis; an accuracy's never leave 0 and 1."""
    values = [low, high, *([line] if line is not None else [])]
    low, high = min(values), max(values)
    step = 10 ** math.floor(math.log10(max(high - low, 0.01))) / 2
    low, high = math.floor(low / step) * step, math.ceil(high / step) * step
    if high <= low:
        high = low + step
    return (max(0.0, low), min(1.0, high)) if whole else (low, high)


def _on(value: float | None, low: float, high: float) -> float | None:
    """In per cent of the axis, a little inside of its ends."""
    return None if value is None else round(2 + 96 * min(1.0, max(0.0, (value - low) / (high - low))), 2)
