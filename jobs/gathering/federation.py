"""What a federation's page asks of the database: a bounded number of rounds, and of clients those worth a look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from django.db.models import Max, Min, Q
from numpy.typing import NDArray

from jobs import rounds
from jobs.client_name import called
from jobs.gathering.clients import NEVER_IN_TIME, WORST, foremost
from jobs.models import Client, Event, Round
from jobs.presenting import federation as drawn
from jobs.presenting.federation import Fairness, Straggler
from jobs.presenting.header import Life, number
from training.federation.tables import NAME_LETTERS
from vigil_core import untrusted

COLUMNS = 120
ROWS = 60
TABLE = 30
IN_TROUBLE = 45
"""Of many clients, rows for those in trouble; the others are a sample."""
WORST_SHOWN = 12
STRAGGLERS = 8
MEDIAN_OF = 20_000
PACED = frozenset({"asynchronous", "deadline"})
"""Paces that wait for no straggler: being late is how they are meant, and late updates are used."""
DROPPED = "client.dropped"
DROPPED_READ = 200
MOST_TEXT = 8_000


@dataclass(frozen=True, kw_only=True)
class Picture:
    """The matrix: `window` are its rounds, `clients` how many there are; `is_sample`: not all of them have a row."""

    window: list[Round]
    data: dict[str, Any]
    says: str
    clients: int
    shown: int
    is_sample: bool
    misbehaves: str
    older: int | None
    """The round before which the page before it ends; None: there is none."""
    newer: int | None
    names: dict[int, str]
    """What those are called that were the worst in a round …"""
    evaluated: dict[int, int]
    """… and on how many samples they were evaluated."""

    @property
    def last(self) -> int:
        return self.window[-1].number if self.window else 0

    @property
    def newest_first(self) -> list[tuple[Round, str, int | None]]:
        """Those in the table behind the drawing, each with name and evaluation samples of its worst client."""
        return [
            (row, self.names.get(worst, ""), self.evaluated.get(worst))
            for row in self.window[: -TABLE - 1 : -1]
            for worst in [-1 if row.worst is None else row.worst]
        ]


@dataclass(frozen=True)
class DroppedOut:
    """Clients that dropped out for the same reason."""

    says: str
    traceback: str
    who: list[tuple[int, int]]
    """Client and round, the newest first."""
    newest: str
    """What the newest of them is called."""


def picture(life: Life, *, before: int | None = None) -> Picture:
    """The newest rounds, or those before one."""
    spanned = rounds.spans(life.attempts)
    window = rounds.newest(spanned, COLUMNS, before=before)
    newest = rounds.newest(spanned, 1)
    last, done = (row[-1].number if row else 0 for row in (window, newest))
    wanted = life.progress.steps or last
    whole = before is None and max(wanted, last) <= COLUMNS
    columns = max(wanted, last) if whole else min(COLUMNS, max(last, 1))
    first = 1 if whole else max(1, last - columns + 1)
    window = [row for row in window if row.number >= first]
    did = _did(window, first)
    total = _total(life, did)
    chosen = np.arange(total) if total <= ROWS else _chosen(did)
    known = {row.number: row for row in Client.objects.filter(job=life.job, number__in=chosen.tolist())}
    cells = _cells(did, chosen, columns)
    rows = [(client, known.get(client)) for client in chosen.tolist()]
    data = drawn.matrix(
        window,
        cells.tolist(),
        rows,
        first=first,
        columns=columns,
        done=max(0, last - first + 1),
        total=max(wanted, done),
    )
    worst = [row.worst for row in window[-TABLE:] if row.worst is not None]
    return Picture(
        window=window,
        data=data,
        says=_says(data["rows"], first, last),
        clients=total,
        shown=len(rows),
        is_sample=len(rows) < total,
        misbehaves=_misbehaves(life, did) if before is None else "",
        older=first if first > 1 else None,
        newer=min(done, last + COLUMNS) + 1 if last < done else None,
        names=rounds.names(life.job, worst),
        evaluated=rounds.evaluation_samples(life.job, worst),
    )


def fairness(life: Life) -> Fairness | None:
    """The clients that the model serves worst; None before anything is known of any."""
    return of_page(life, foremost(life.job, worst_first(life), WORST_SHOWN))


def of_page(life: Life, clients: Sequence[Client]) -> Fairness | None:
    """The same for clients that somebody has chosen."""
    measure = _measure(life)
    ends = Client.objects.filter(job=life.job).aggregate(low=Min(measure), high=Max(measure), most=Max("samples"))
    if not clients:
        return None
    labels, split = rounds.splits(life.job, [one.number for one in clients])
    is_timed = Client.objects.filter(job=life.job, timed__gt=0).exists()
    name = "accuracy" if measure == "accuracy" else "validation_loss"
    return drawn.fairness(
        clients,
        split,
        labels,
        measure=measure,
        ends=(ends["low"] or 0.0, ends["high"] if ends["high"] is not None else 1.0),
        line=number(life.latest.latest, name),
        is_timed=is_timed,
        most_samples=ends["most"] or max((sum(counts) for counts in split.values()), default=1),
    )


def stragglers(life: Life) -> list[Straggler]:
    """The slowest clients, where the pace has a clock; those first that were never in time."""
    timed = Client.objects.filter(job=life.job, timed__gt=0)
    if not timed.exists() and _pace(life) != "deadline":
        return []
    shown = foremost(life.job, "seconds", STRAGGLERS, Q(timed__gt=0) | NEVER_IN_TIME)
    told = timed.values_list("seconds_sum", "timed")[: MEDIAN_OF + 1]
    means = np.array([total / times for total, times in told])
    return drawn.stragglers(shown, float(np.median(means)) if len(means) <= MEDIAN_OF else None)


def _pace(life: Life) -> object:
    return (life.job.spec.get("run") or {}).get("pace")


def dropped_out(life: Life) -> tuple[list[DroppedOut], bool]:
    """Why clients dropped out, by what their programs raised; and whether there may be more than was read."""
    events = Event.objects.filter(attempt__in=life.attempts, kind=DROPPED, rank=0).order_by("-id")
    found: dict[str, DroppedOut] = {}
    told = list(events.values_list("data", flat=True)[:DROPPED_READ])
    for data in told:
        client, at = untrusted.count(data.get("client"), 2**32), untrusted.count(data.get("step"), 2**32)
        text = data.get("traceback")
        if client is None or at is None or not isinstance(text, str):
            continue
        text = text[-MOST_TEXT:].strip()
        says = untrusted.line(text.rpartition("\n")[2]) or "It gave no reason."
        name = untrusted.name(data.get("name"), NAME_LETTERS)
        found.setdefault(text, DroppedOut(says, text, [], called(client, name))).who.append((client, at))
    return list(found.values()), len(told) == DROPPED_READ


@dataclass(frozen=True)
class _Did:
    """What is known of clients in the window: columns of equal length."""

    column: NDArray[np.int64]
    client: NDArray[np.int64]
    state: NDArray[np.int64]


def _did(window: Sequence[Round], first: int) -> _Did:
    parts = [rounds.unpack(row.named) for row in window]
    column = np.repeat([row.number - first for row in window], [len(part) for part in parts]).astype(np.int64)
    together = np.concatenate(parts) if parts else np.zeros(0, rounds.NAMED)
    return _Did(column, together["client"].astype(np.int64), together["state"].astype(np.int64))


def _total(life: Life, did: _Did) -> int:
    run = life.job.spec.get("run") or {}
    asked = untrusted.count(run.get("clients"), 10**6)
    return asked if asked else int(did.client.max(initial=-1)) + 1


def _chosen(did: _Did) -> NDArray[np.int64]:
    """Those with whom something was the matter, the most often first, and of the others every so many."""
    numbers, times = np.unique(did.client[did.state > 0], return_counts=True)
    troubled = numbers[np.argsort(-times, kind="stable")][:IN_TROUBLE]
    others = np.setdiff1d(did.client, troubled)
    room = min(ROWS - len(troubled), len(others))
    sample = others[np.linspace(0, len(others) - 1, room).astype(np.int64)] if room else others[:0]
    return np.concatenate([np.sort(troubled), sample]).astype(np.int64)


def _cells(did: _Did, chosen: NDArray[np.int64], columns: int) -> NDArray[np.int64]:
    cells = np.full((len(chosen), columns), -1, np.int64)
    if not len(chosen):
        return cells
    order = np.argsort(chosen)
    at = np.minimum(np.searchsorted(chosen[order], did.client), len(chosen) - 1)
    row = order[at]
    is_shown = (chosen[row] == did.client) & (did.column >= 0) & (did.column < columns)
    cells[row[is_shown], did.column[is_shown]] = did.state[is_shown]
    return cells


def _lately(did: _Did) -> dict[int, list[int]]:
    """Of each client that was in trouble, its states in the newest rounds."""
    recent = did.column > did.column.max(initial=0) - drawn.LOOKED_BACK
    client, state = did.client[recent], did.state[recent]
    troubled = np.isin(client, client[state > 0])
    found: dict[int, list[int]] = {}
    for one, what in zip(client[troubled].tolist(), state[troubled].tolist(), strict=True):
        found.setdefault(one, []).append(what)
    return found


def _misbehaves(life: Life, did: _Did) -> str:
    lately = _lately(did)
    fine = frozenset({"late"} if _pace(life) in PACED else ())
    return drawn.misbehaves(lately, rounds.names(life.job, lately), fine=fine)


def _says(rows: Sequence[dict[str, Any]], first: int, last: int) -> str:
    """The drawing in a sentence, for who does not see it."""
    odd = [f"{row['name']} {row['note']}" for row in rows if row["odd"]]
    some = ", ".join(odd[:5]) + (f" and {len(odd) - 5} more" if len(odd) > 5 else "")
    return f"{len(rows)} clients by rounds {first} to {last}. {some or 'Hardly any was in trouble'}."


def _measure(life: Life) -> str:
    """What clients are compared by: accuracy, where the recipe tells one."""
    return "accuracy" if Client.objects.filter(job=life.job, accuracy__isnull=False).exists() else "loss"


def worst_first(life: Life) -> str:
    """The order that has those first whom the model serves worst."""
    return WORST if _measure(life) == "accuracy" else "loss"
