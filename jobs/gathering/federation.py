"""Query the rounds and clients for a federation's page: a bounded number of rounds, and the clients worth showing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from django.db.models import Max, Min, Q
from numpy.typing import NDArray

from jobs import rounds
from jobs.client_name import client_name
from jobs.gathering.clients import NEVER_IN_TIME, WORST, first_clients
from jobs.gathering.job_life import JobLife
from jobs.models import Client, Event, Round
from jobs.presenting.federations import clients as drawn
from jobs.presenting.federations.clients import ClientFacts, Fairness, SlowClient
from jobs.presenting.metric_values import number
from training.federation.tables import NAME_CHARACTERS
from vigil_core import untrusted

COLUMNS = 120
ROWS = 60
TABLE = 30
TROUBLED_ROWS = 45
"""With many clients, rows for those with problems; the others are a sample."""
WORST_SHOWN = 12
STRAGGLERS = 8
MEDIAN_OF = 20_000
PACES_WITHOUT_WAITING = frozenset({"asynchronous", "deadline"})
"""Paces that do not wait for stragglers: late updates are expected and used."""
DROPPED = "client.dropped"
DROPPED_READ = 200
MAX_TEXT = 8_000


@dataclass(frozen=True, kw_only=True)
class RoundMatrix:
    """The matrix of rounds and clients. `clients` is their total number; with `is_sample` only some have a row."""

    window: list[Round]
    data: dict[str, Any]
    description: str
    clients: int
    shown: int
    is_sample: bool
    trouble: str
    older: int | None
    """Cursor of the previous page; None if there is none."""
    newer: int | None
    names: dict[int, str]
    """Names of the clients that were worst in a round."""
    evaluated: dict[int, int]
    """On how many samples these clients were evaluated."""

    @property
    def last(self) -> int:
        return self.window[-1].number if self.window else 0

    @property
    def newest_first(self) -> list[tuple[Round, str, int | None]]:
        """Return the rounds of the table, each with name and evaluation samples of its worst client."""
        return [
            (row, self.names.get(worst, ""), self.evaluated.get(worst))
            for row in self.window[: -TABLE - 1 : -1]
            for worst in [-1 if row.worst is None else row.worst]
        ]


@dataclass(frozen=True)
class DropoutGroup:
    """Clients that dropped out for the same reason."""

    reason: str
    traceback: str
    who: list[tuple[int, int]]
    """Client and round, the newest first."""
    newest: str
    """Name of the newest one."""


def round_matrix(life: JobLife, *, before: int | None = None) -> RoundMatrix:
    """Return the matrix of the newest rounds, or of those before round `before`."""
    spanned = rounds.spans(life.attempts)
    window = rounds.newest(spanned, COLUMNS, before=before)
    newest = rounds.newest(spanned, 1)
    last, done = (row[-1].number if row else 0 for row in (window, newest))
    wanted = life.progress.steps or last
    whole = before is None and max(wanted, last) <= COLUMNS
    columns = max(wanted, last) if whole else min(COLUMNS, max(last, 1))
    first = 1 if whole else max(1, last - columns + 1)
    window = [row for row in window if row.number >= first]
    states = _client_states(window, first)
    total = _total(life, states)
    chosen = np.arange(total) if total <= ROWS else _choose_clients(states)
    clients = {row.number: row for row in Client.objects.filter(job=life.job, number__in=chosen.tolist())}
    cells = _cells(states, chosen, columns)
    rows = [(number, row.name if (row := clients.get(number)) else "") for number in chosen.tolist()]
    data = drawn.matrix(
        {row.number: row.accuracy for row in window if row.accuracy is not None},
        cells.tolist(),
        rows,
        first=first,
        columns=columns,
        done=max(0, last - first + 1),
        total=max(wanted, done),
    )
    worst = [row.worst for row in window[-TABLE:] if row.worst is not None]
    return RoundMatrix(
        window=window,
        data=data,
        description=_description(data["rows"], first, last),
        clients=total,
        shown=len(rows),
        is_sample=len(rows) < total,
        trouble=_trouble(life, states) if before is None else "",
        older=first if first > 1 else None,
        newer=min(done, last + COLUMNS) + 1 if last < done else None,
        names=rounds.names(life.job, worst),
        evaluated=rounds.evaluation_samples(life.job, worst),
    )


def fairness(life: JobLife) -> Fairness | None:
    """Return the clients that the model serves worst; None until any client has reported."""
    return fairness_of(life, first_clients(life.job, worst_first(life), WORST_SHOWN))


def fairness_of(life: JobLife, clients: Sequence[Client]) -> Fairness | None:
    """Return the fairness table for these clients."""
    measure = _measure(life)
    value_range = Client.objects.filter(job=life.job).aggregate(
        low=Min(measure), high=Max(measure), most=Max("samples")
    )
    if not clients:
        return None
    labels, split = rounds.splits(life.job, [client.number for client in clients])
    is_timed = Client.objects.filter(job=life.job, timed__gt=0).exists()
    name = "accuracy" if measure == "accuracy" else "validation_loss"
    scale = drawn.FairnessScale(
        measure=measure,
        low=value_range["low"] or 0.0,
        high=value_range["high"] if value_range["high"] is not None else 1.0,
        global_value=number(life.latest.latest, name),
        max_samples=value_range["most"] or max((sum(counts) for counts in split.values()), default=1),
    )
    return drawn.fairness([_facts(client) for client in clients], split, labels, scale, is_timed=is_timed)


def stragglers(life: JobLife) -> list[SlowClient]:
    """Return the slowest clients if the pace measures time, those that were never in time first."""
    timed = Client.objects.filter(job=life.job, timed__gt=0)
    if not timed.exists() and _pace(life) != "deadline":
        return []
    shown = first_clients(life.job, "seconds", STRAGGLERS, Q(timed__gt=0) | NEVER_IN_TIME)
    totals = timed.values_list("seconds_sum", "timed")[: MEDIAN_OF + 1]
    means = np.array([total / times for total, times in totals])
    facts = [_facts(client) for client in shown]
    return drawn.stragglers(facts, float(np.median(means)) if len(means) <= MEDIAN_OF else None)


def _facts(client: Client) -> ClientFacts:
    names = [field.name for field in fields(ClientFacts)]
    return ClientFacts(**{name: getattr(client, name) for name in names})


def _pace(life: JobLife) -> object:
    return (life.job.spec.get("run") or {}).get("pace")


def dropout_groups(life: JobLife) -> tuple[list[DropoutGroup], bool]:
    """Return why clients dropped out, by the exception they raised; and whether there may be more than were read."""
    events = Event.objects.filter(attempt__in=life.attempts, kind=DROPPED, rank=0).order_by("-id")
    groups: dict[str, DropoutGroup] = {}
    reports = list(events.values_list("data", flat=True)[:DROPPED_READ])
    for data in reports:
        client, at = untrusted.count(data.get("client"), 2**32), untrusted.count(data.get("step"), 2**32)
        text = data.get("traceback")
        if client is None or at is None or not isinstance(text, str):
            continue
        text = text[-MAX_TEXT:].strip()
        reason = untrusted.line(text.rpartition("\n")[2]) or "No reason given."
        name = untrusted.name(data.get("name"), NAME_CHARACTERS)
        groups.setdefault(text, DropoutGroup(reason, text, [], client_name(client, name))).who.append((client, at))
    return list(groups.values()), len(reports) == DROPPED_READ


@dataclass(frozen=True)
class _ClientStates:
    """The states of clients in the window, as columns of equal length."""

    column: NDArray[np.int64]
    client: NDArray[np.int64]
    state: NDArray[np.int64]


def _client_states(window: Sequence[Round], first: int) -> _ClientStates:
    parts = [rounds.unpack(row.named) for row in window]
    column = np.repeat([row.number - first for row in window], [len(part) for part in parts]).astype(np.int64)
    together = np.concatenate(parts) if parts else np.zeros(0, rounds.NAMED)
    return _ClientStates(column, together["client"].astype(np.int64), together["state"].astype(np.int64))


def _total(life: JobLife, states: _ClientStates) -> int:
    run = life.job.spec.get("run") or {}
    configured = untrusted.count(run.get("clients"), 10**6)
    return configured if configured else int(states.client.max(initial=-1)) + 1


def _choose_clients(states: _ClientStates) -> NDArray[np.int64]:
    """Return the clients with problems, most frequent first, and an even sample of the others."""
    numbers, times = np.unique(states.client[states.state > 0], return_counts=True)
    troubled = numbers[np.argsort(-times, kind="stable")][:TROUBLED_ROWS]
    others = np.setdiff1d(states.client, troubled)
    room = min(ROWS - len(troubled), len(others))
    sample = others[np.linspace(0, len(others) - 1, room).astype(np.int64)] if room else others[:0]
    return np.concatenate([np.sort(troubled), sample]).astype(np.int64)


def _cells(states: _ClientStates, chosen: NDArray[np.int64], columns: int) -> NDArray[np.int64]:
    cells = np.full((len(chosen), columns), -1, np.int64)
    if not len(chosen):
        return cells
    order = np.argsort(chosen)
    at = np.minimum(np.searchsorted(chosen[order], states.client), len(chosen) - 1)
    row = order[at]
    is_shown = (chosen[row] == states.client) & (states.column >= 0) & (states.column < columns)
    cells[row[is_shown], states.column[is_shown]] = states.state[is_shown]
    return cells


def _recent_states(states: _ClientStates) -> dict[int, list[int]]:
    """Return the states in the newest rounds of each client that had problems there."""
    recent = states.column > states.column.max(initial=0) - drawn.RECENT_ROUNDS
    client, state = states.client[recent], states.state[recent]
    troubled = np.isin(client, client[state > 0])
    found: dict[int, list[int]] = {}
    for client_number, value in zip(client[troubled].tolist(), state[troubled].tolist(), strict=True):
        found.setdefault(client_number, []).append(value)
    return found


def _trouble(life: JobLife, states: _ClientStates) -> str:
    recent = _recent_states(states)
    expected = frozenset({"late"} if _pace(life) in PACES_WITHOUT_WAITING else ())
    return drawn.trouble_sentence(recent, rounds.names(life.job, recent), expected=expected)


def _description(rows: Sequence[dict[str, Any]], first: int, last: int) -> str:
    """Return the drawing as a sentence, for screen readers."""
    odd = [f"{row['name']} {row['note']}" for row in rows if row["odd"]]
    some = ", ".join(odd[:5]) + (f" and {len(odd) - 5} more" if len(odd) > 5 else "")
    return f"{len(rows)} clients by rounds {first} to {last}. {some or 'Hardly any had problems'}."


def _measure(life: JobLife) -> str:
    """Return what clients are compared by: accuracy if the recipe reports it, else loss."""
    return "accuracy" if Client.objects.filter(job=life.job, accuracy__isnull=False).exists() else "loss"


def worst_first(life: JobLife) -> str:
    """Return the sort order that puts the worst-served clients first."""
    return WORST if _measure(life) == "accuracy" else "loss"
