"""Present the rounds and clients of a federation: matrix, fairness, stragglers.

Pure; facts in, words and drawings out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jobs.client_name import client_name
from training.federation.tables import STATES
from vigil_core import formatting

RECENT_ROUNDS = 30
"""Number of recent rounds that the sentence describes."""
MIN_OCCURRENCES = 3
"""How often something must happen to a client before it is mentioned."""
MIN_SHARE = 0.25
"""In what share of a client's rounds something must happen before it is mentioned."""
COLOUR_COUNT = 9
"""Number of labels shown separately in a bar; the last one stands for the rest."""
_TROUBLES = {
    "rejected": "has been rejected in {k} of its last {m} rounds",
    "broken": "sent non-finite updates in {k} of its last {m} rounds",
    "dropped": "dropped out of {k} of its last {m} rounds",
    "late": "was late in {k} of its last {m} rounds",
}
_TROUBLE_STATES = {"rejected": "failed", "broken": "failed", "dropped": "cancelled", "late": "timeout"}
"""The state that gives a client with this problem its colour."""


@dataclass(frozen=True, kw_only=True)
class ClientFacts:
    """A client's totals over all rounds, and its newest values."""

    number: int
    name: str
    samples: int | None
    evaluation_samples: int | None
    trained: int
    late: int
    dropped: int
    rejected: int
    broken: int
    loss: float | None
    accuracy: float | None
    seconds: float | None
    """Mean duration of its rounds."""

    @property
    def out(self) -> int:
        """Return how often its update arrived and was not used."""
        return self.rejected + self.broken


@dataclass(frozen=True)
class BarShare:
    """A segment of a client's bar, in per cent of the largest client's bar; `color` is 0 to 8."""

    color: int
    x: float
    width: float


@dataclass(frozen=True, kw_only=True)
class ClientRow:
    """A client's row in the fairness table."""

    client: ClientFacts
    trouble: str
    """Its most frequent problem, such as "late 21×"; "" if it rarely has any."""
    state: str
    x: float | None
    """Position of its accuracy (or loss) on the axis, in per cent."""
    value: float | None
    shares: list[BarShare]
    shares_text: str
    """Text alternative of the bar."""


@dataclass(frozen=True, kw_only=True)
class Fairness:
    """The model's quality for each client.

    `low` and `high` are the ends of the axis; `global_x` is the position of the global model, in per cent.
    """

    measure: str
    rows: list[ClientRow]
    low: float
    high: float
    global_x: float | None
    labels: list[str]
    is_timed: bool
    """Whether any client has a duration of its own; clients computed together have none."""


@dataclass(frozen=True, kw_only=True)
class FairnessScale:
    """The measure and its range with which all clients of the fairness table are compared.

    `low` and `high` are the lowest and highest value of `measure` over all clients, `global_value` is the global
    model's; `max_samples` are those of the largest client.
    """

    measure: str
    low: float
    high: float
    global_value: float | None
    max_samples: int


@dataclass(frozen=True, kw_only=True)
class SlowClient:
    """A straggler.

    `times` is its mean round time relative to the median client; `width` relative to the slowest, in per cent.
    """

    client: ClientFacts
    times: float | None
    width: float


def matrix(
    accuracies: Mapping[int, float],
    cells: Sequence[Sequence[int]],
    clients: Sequence[tuple[int, str]],
    *,
    first: int,
    columns: int,
    done: int,
    total: int,
) -> dict[str, Any]:
    """Return the data for the drawing: a row per client, a column per round.

    `accuracies` are those of the rounds, `clients` numbers and names. A cell is the index of a state, −1 if unknown.
    The note at a row's end counts its cells.
    """
    rows = [_matrix_row(number, name, values) for (number, name), values in zip(clients, cells, strict=True)]
    return {
        "rows": rows,
        "states": STATES,
        "first": first,
        "columns": columns,
        "done": done,
        "total": total,
        "accuracy": {number - first: formatting.loss(accuracy) for number, accuracy in accuracies.items()},
    }


def _matrix_row(number: int, owner: str, values: Sequence[int]) -> dict[str, Any]:
    times = {state: values.count(i) for i, state in enumerate(STATES)}
    trouble = _main_trouble(times)
    return {
        "name": client_name(number, owner),
        "short": str(number),
        "owner": owner,
        "note": trouble or _contribution_text(times),
        "odd": bool(trouble),
        "values": list(values),
    }


def trouble_of(client: ClientFacts) -> str:
    """Return the client's most frequent problem, if it occurs often enough to mention."""
    return _main_trouble({state: int(getattr(client, state)) for state in STATES})


def _main_trouble(times: Mapping[str, int]) -> str:
    worst = max(_TROUBLES, key=lambda state: times[state])
    often = times[worst] >= MIN_OCCURRENCES and times[worst] >= 0.05 * sum(times.values())
    return f"{worst} {formatting.count(times[worst])}×" if often else ""


def _contribution_text(times: Mapping[str, int]) -> str:
    """Return the share of the client's selected rounds in which its update was used."""
    selected = sum(times.values())
    return formatting.share((times["trained"] + times["late"]) / selected) if selected else ""


def trouble_sentence(
    recent_states: Mapping[int, Sequence[int]], names: Mapping[int, str], *, expected: frozenset[str] = frozenset()
) -> str:
    """Return a sentence about the client with the most problems; "" if none has many.

    `recent_states` holds each client's states in the newest rounds; states in `expected` are not counted as problems.
    """
    troubles = []
    for client, states in recent_states.items():
        for rank, state in enumerate(_TROUBLES):
            times = 0 if state in expected else sum(number == STATES.index(state) for number in states)
            if times >= MIN_OCCURRENCES and times >= MIN_SHARE * len(states):
                troubles.append((-rank, times, -client, state, len(states)))
    if not troubles:
        return ""
    _, times, client, state, of = max(troubles)
    more = len({entry[2] for entry in troubles}) - 1
    others = f" {formatting.plural(more, 'more client has', 'more clients have')} problems." if more else ""
    who = client_name(-client, names.get(-client, ""))
    return f"C{who[1:]} {_TROUBLES[state].format(k=times, m=of)}.{others}"


def fairness(
    clients: Sequence[ClientFacts],
    split: Mapping[int, Sequence[int]],
    labels: Sequence[str],
    scale: FairnessScale,
    *,
    is_timed: bool,
) -> Fairness:
    """Build the fairness table of these clients. `split` maps a client's number to its samples by label."""
    low, high = _axis_ends(scale.low, scale.high, scale.global_value, whole=scale.measure == "accuracy")
    axis = replace(scale, low=low, high=high)
    return Fairness(
        measure=scale.measure,
        rows=[_client_row(client, split.get(client.number), labels, axis) for client in clients],
        low=low,
        high=high,
        global_x=_axis_position(scale.global_value, low, high),
        labels=legend(labels),
        is_timed=is_timed,
    )


def stragglers(clients: Sequence[ClientFacts], median: float | None) -> list[SlowClient]:
    """Return rows for these clients, which come slowest first."""
    most = max((client.seconds or 0.0 for client in clients), default=0.0)
    return [
        SlowClient(
            client=client,
            times=client.seconds / median if median and client.seconds is not None else None,
            width=round(100 * (client.seconds or 0.0) / most, 2) if most else 0.0,
        )
        for client in clients
    ]


def _client_row(
    client: ClientFacts, counts: Sequence[int] | None, labels: Sequence[str], axis: FairnessScale
) -> ClientRow:
    trouble, value = trouble_of(client), getattr(client, axis.measure)
    return ClientRow(
        client=client,
        trouble=trouble,
        state=_TROUBLE_STATES.get(trouble.partition(" ")[0], "running"),
        x=_axis_position(value, axis.low, axis.high),
        value=value,
        shares=shares(counts or [], max(1, axis.max_samples)),
        shares_text=counts_text(counts or [], labels) or f"{formatting.count(client.samples)} samples",
    )


def shares(counts: Sequence[int], most: int) -> list[BarShare]:
    """Return the segments of a client's bar, by label."""
    shown = list(counts[: COLOUR_COUNT - 1]) + (
        [sum(counts[COLOUR_COUNT - 1 :])] if len(counts) >= COLOUR_COUNT else []
    )
    segments, x = [], 0.0
    for color, count in enumerate(shown, first_colour(shown)):
        width = 100 * count / most
        if count:
            segments.append(BarShare(color, round(x, 3), round(width, 3)))
        x += width
    return segments


def first_colour(counts: Sequence[int]) -> int:
    """Return the colour of the first label: grey (0) is only used if there are several labels."""
    return 1 if len(counts) == 1 else 0


def counts_text(counts: Sequence[int], labels: Sequence[str]) -> str:
    """Return the bar's content as text: "cat 120, dog 80"."""
    parts = [f"{label} {formatting.count(count)}" for label, count in zip(labels, counts, strict=False) if count]
    return ", ".join(parts[:12]) + (f" and {len(parts) - 12} more labels" if len(parts) > 12 else "")


def legend(labels: Sequence[str]) -> list[str]:
    """Return the meaning of each colour; empty if there is only one label."""
    shown, beyond = list(labels[: COLOUR_COUNT - 1]), labels[COLOUR_COUNT - 1 :]
    if len(labels) < 2:
        return []
    return shown if not beyond else [*shown, *(beyond if len(beyond) == 1 else [f"{len(beyond)} others"])]


def _axis_ends(low: float, high: float, global_value: float | None, *, whole: bool) -> tuple[float, float]:
    """Round the ends of an axis; an accuracy axis stays within 0 and 1."""
    values = [low, high, *([global_value] if global_value is not None else [])]
    low, high = min(values), max(values)
    step = 10 ** math.floor(math.log10(max(high - low, 0.01))) / 2
    low, high = math.floor(low / step) * step, math.ceil(high / step) * step
    if high <= low:
        high = low + step
    return (max(0.0, low), min(1.0, high)) if whole else (low, high)


def _axis_position(value: float | None, low: float, high: float) -> float | None:
    """Return the position in per cent of the axis, inset by 2 % at both ends."""
    return None if value is None else round(2 + 96 * min(1.0, max(0.0, (value - low) / (high - low))), 2)
