"""Turn a federation's reports of rounds and clients into rows, without trusting them.

A post stores such an event as it came, with a row that marks it as pending; right after, each is applied in a few
short transactions. An event whose table cannot be what our server packs stays as it came; for the others the rows have
the table, and the event keeps only counts.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import numpy as np
from django.db import transaction
from numpy.typing import NDArray

from jobs import rounds, starting_steps
from jobs.models import Attempt, Client, ClientSplit, Event, PendingRoundEvent, Round
from portal import bulk
from training.federation.tables import STATES, ClientNames, RoundTable, SplitTable, TableError
from vigil_core import untrusted

ROUNDS, SPLIT, NAMED, STARTED = "round.clients", "clients.split", "clients.named", "run.started"
KINDS = frozenset({ROUNDS, SPLIT, NAMED, STARTED})
PACKED = frozenset({"rounds", "clients", "counts", "evaluated", "names"})
ROUNDS_PER_TRANSACTION = 2_000  # that are dropped
CLIENTS_PER_TRANSACTION = 1_500  # of a split or of names: 35 ms of processor time on PostgreSQL
MAX_PENDING = 100  # of an attempt: what is beyond waits in its spool
MAX_ROUNDS = 1_000_000
"""Limit of rounds of a federation, as in its configuration; and of clients:"""
MAX_CLIENTS = 100_000
MAX_PARTS = 2_000
"""Rows of a job's split: 100,000 clients of 64 labels take 1,076."""
_COUNT_LIMIT = 2**31
_MAX_BYTES = 2**53
_FIELDS = [f.name for f in Round._meta.concrete_fields if f.name not in {"id", "attempt", "number"}]

_OUTCOMES = ("trained", "late", "dropped", "rejected", "broken", "timed", "seconds_sum")
_IS_NEWER = "(excluded.last_attempt, excluded.last_round) >= (jobs_client.last_attempt, jobs_client.last_round)"
_COUNTED = ("job", "number", *_OUTCOMES, "loss", "accuracy", "last_attempt", "last_round")
_COUNT_CLIENTS = f"""
    ON CONFLICT (job_id, number) DO UPDATE SET
        {", ".join(f"{name} = jobs_client.{name} + excluded.{name}" for name in _OUTCOMES)},
        loss = CASE WHEN {_IS_NEWER} THEN COALESCE(excluded.loss, jobs_client.loss)
            ELSE COALESCE(jobs_client.loss, excluded.loss) END,
        accuracy = CASE WHEN {_IS_NEWER} THEN COALESCE(excluded.accuracy, jobs_client.accuracy)
            ELSE COALESCE(jobs_client.accuracy, excluded.accuracy) END,
        last_round = CASE WHEN {_IS_NEWER} THEN excluded.last_round ELSE jobs_client.last_round END,
        last_attempt = CASE WHEN {_IS_NEWER} THEN excluded.last_attempt ELSE jobs_client.last_attempt END
"""


def is_pending(attempt: Attempt, event: Event) -> bool:
    """Return whether an event of the federation's server has to be made into rows."""
    return attempt.job.kind == "federated" and event.rank == 0 and event.incarnation is not None and event.kind in KINDS


def note_pending(attempt: Attempt, events: Iterable[Event]) -> bool:
    """Mark the events that `apply_pending` has to read, in the transaction that stores them; return whether any."""
    pending = [PendingRoundEvent(attempt=attempt, event=event) for event in events if is_pending(attempt, event)]
    PendingRoundEvent.objects.bulk_create(pending)
    return bool(pending)


def has_room(attempt_id: int, until: float) -> bool:
    """Return whether an attempt may send more; until that monotonic time it makes room."""
    return count_pending(attempt_id) < MAX_PENDING or apply_pending(attempt_id, until)


def count_pending(attempt_id: int) -> int:
    return PendingRoundEvent.objects.filter(attempt=attempt_id).count()


def apply_pending(attempt_id: int, until: float) -> bool:
    """Make stored events into rows, in short transactions, until that monotonic time; return whether all.

    An event stands first in line until the last of its rows are committed, so that a killed process loses nothing. What
    it had committed of that event is written once more by whoever goes on: only the last transaction of an event counts
    anything.
    """
    current, done = None, 0
    while (began := time.monotonic()) < until:
        with transaction.atomic():
            # The lock comes first: who else applies this attempt's events waits, and then sees what is left.
            attempt = Attempt.objects.filter(pk=attempt_id).for_reports().first()
            first = PendingRoundEvent.objects.filter(attempt=attempt_id).select_related("event").order_by("pk").first()
            if attempt is None or first is None:
                return True
            if first.pk != current:
                current, done = first.pk, 0
            if _apply(attempt, first.event, done):
                first.delete()
        done += 1
        bulk.give_way(began)
    return not count_pending(attempt_id)


def apply_left_over(until: float) -> None:
    """Apply what an intake had no time for, whichever attempt it belongs to."""
    for attempt_id in PendingRoundEvent.objects.order_by("attempt").values_list("attempt", flat=True).distinct():
        apply_pending(attempt_id, until)


def summary_of(event: Event) -> dict[str, Any]:
    """Return the event's data without its packed tables: those are for the database alone."""
    return {name: value for name, value in event.data.items() if name not in PACKED}


def _apply(attempt: Attempt, event: Event, done: int) -> bool:
    """Store an event's next part, after the first `done`; return whether it was the last. The attempt is locked."""
    assert event.incarnation is not None
    if event.kind == STARTED:
        return _drop_repeated(attempt, event.incarnation, event.data.get("start_step"))
    try:
        counts = _STORES[event.kind](attempt, event, done)
    except TableError:
        return True  # it stays the event that it is
    if counts is None:
        return False
    Event.objects.filter(pk=event.pk).update(data={**event.data, **counts})
    return True


def _store_rounds(attempt: Attempt, event: Event, done: int) -> dict[str, int] | None:
    """Store a table's rounds, then count what its clients did: that part alone must not be repeated."""
    table = _checked(RoundTable.unpack(event.data))
    if not done:
        _write_rounds(attempt, event, table)
        return None
    _count_clients(attempt, table)
    return {"rounds": len(table.rounds["round"]), "clients": len(table.clients["round"])}


def _store_split(attempt: Attempt, event: Event, done: int) -> dict[str, int] | None:
    """Store some clients of a split, the packed counts of all with the first; return how many there are at the end."""
    split = SplitTable.unpack(event.data)
    _check_clients(split.first + len(split.counts))
    if not done:
        _write_split(attempt, split)
    part = slice(done * CLIENTS_PER_TRANSACTION, (done + 1) * CLIENTS_PER_TRANSACTION)
    first = split.first + part.start
    _set_column(attempt, "samples", first, _as_integers(split.counts[part].astype(np.int64).sum(axis=1)))
    if split.evaluated is not None:
        _set_column(attempt, "evaluation_samples", first, _as_integers(split.evaluated[part].astype(np.int64)))
    return {"counts": len(split.counts)} if part.stop >= len(split.counts) else None


def _store_names(attempt: Attempt, event: Event, done: int) -> dict[str, int] | None:
    """Store the names of some clients; return how many there are at the end."""
    named = ClientNames.unpack(event.data)
    _check_clients(named.first + len(named.names))
    part = slice(done * CLIENTS_PER_TRANSACTION, (done + 1) * CLIENTS_PER_TRANSACTION)
    _set_column(attempt, "name", named.first + part.start, named.names[part])
    return {"names": len(named.names)} if part.stop >= len(named.names) else None


_STORES = {ROUNDS: _store_rounds, SPLIT: _store_split, NAMED: _store_names}
"""By kind: stores an event's next part, given the parts done; returns counts by field with the last, else None."""


def _drop_repeated(attempt: Attempt, incarnation: int, start: object) -> bool:
    """Drop some rounds that an earlier incarnation did beyond where this one began; return whether none are left."""
    if type(start) is not int or start < 0:
        return True
    beyond = attempt.rounds.filter(incarnation__lt=incarnation, number__gt=start)
    batch = list(beyond.values_list("pk", flat=True)[:ROUNDS_PER_TRANSACTION])
    Round.objects.filter(pk__in=batch).delete()
    return len(batch) < ROUNDS_PER_TRANSACTION


def _check_clients(last: int) -> None:
    if last > MAX_CLIENTS:
        raise TableError("more clients than there can be")


def _checked(table: RoundTable) -> RoundTable:
    """Check that a table fits the columns, and the limits of a configuration."""
    columns = table.rounds
    if (columns["round"] > MAX_ROUNDS).any() or (table.clients["client"] >= MAX_CLIENTS).any():
        raise TableError("more rounds or clients than there can be")
    if any((columns[name] >= _COUNT_LIMIT).any() for name in STATES) or (columns["worst"] >= MAX_CLIENTS).any():
        raise TableError("more clients than there can be")
    if any((columns[name] > _MAX_BYTES).any() for name in ("bytes_up", "bytes_down")):
        raise TableError("more bytes than there can be")
    return table


def _limits(attempt: Attempt) -> dict[int, int]:
    """Return, by incarnation, the round from which a later one continued: rounds beyond it are not of record."""
    starts = starting_steps.steps([attempt], rounds.MAX_STARTS)
    begun = {incarnation: step for (_, incarnation), step in starts.items()}
    found, limit = {}, MAX_ROUNDS
    for incarnation in sorted(begun, reverse=True):
        found[incarnation] = limit
        limit = min(limit, begun[incarnation])
    return found


def _write_rounds(attempt: Attempt, event: Event, table: RoundTable) -> None:
    assert event.incarnation is not None
    limit = _limits(attempt).get(event.incarnation, MAX_ROUNDS)
    rows = {row.number: row for row in _rows(attempt, event.time, event.incarnation, table) if row.number <= limit}
    Round.objects.bulk_create(
        rows.values(), update_conflicts=True, unique_fields=["attempt", "number"], update_fields=_FIELDS
    )


def _rows(attempt: Attempt, at: datetime, incarnation: int, table: RoundTable) -> Iterable[Round]:
    columns, clients = table.rounds, table.clients
    named = np.empty(len(clients["round"]), rounds.NAMED)
    for name in rounds.NAMED.names or ():
        named[name] = clients[name]
    named["seconds"][~(named["seconds"] <= untrusted.MAX_DURATION_S)] = np.nan
    for i, number in enumerate(columns["round"].tolist()):
        yield Round(
            attempt=attempt,
            number=number,
            incarnation=incarnation,
            told_at=at,
            **{name: int(columns[name][i]) for name in (*STATES, "bytes_up", "bytes_down")},
            seconds=untrusted.duration(float(columns["seconds"][i])),
            loss=_number(columns["loss"][i]),
            accuracy=_number(columns["accuracy"][i]),
            worst=int(columns["worst"][i]) if columns["worst"][i] >= 0 else None,
            named=rounds.pack(named[clients["round"] == number]),
        )


def _count_clients(attempt: Attempt, table: RoundTable) -> None:
    """Add what each named client did, and its last known values, in one row per client."""
    order = np.lexsort((table.clients["round"], table.clients["client"]))
    columns = {name: column[order] for name, column in table.clients.items()}
    numbers, first = np.unique(columns["client"], return_index=True)
    if not len(numbers):
        return
    counts = {state: np.add.reduceat((columns["state"] == i).astype(np.int64), first) for i, state in enumerate(STATES)}
    is_timed = (columns["seconds"] >= 0) & (columns["seconds"] <= untrusted.MAX_DURATION_S)
    counts["timed"] = np.add.reduceat(is_timed.astype(np.int64), first)
    counts["seconds_sum"] = np.add.reduceat(np.where(is_timed, columns["seconds"], 0).astype(np.float64), first)
    last = np.append(first[1:], len(order)) - 1
    last_values = {name: _last_finite(columns[name], first) for name in ("loss", "accuracy")}
    rows = zip(
        numbers.tolist(),
        *(counts[name].tolist() for name in _OUTCOMES),
        map(_number, last_values["loss"]),
        map(_number, last_values["accuracy"]),
        columns["round"][last].tolist(),
        strict=True,
    )
    counted = ((attempt.job_id, *row[:-1], attempt.number, row[-1]) for row in rows)
    bulk.insert_rows(Client, _COUNTED, counted, _COUNT_CLIENTS)


def _last_finite(values: NDArray[Any], first: NDArray[np.int64]) -> NDArray[Any]:
    """Return the last finite value of each run that begins at an index in `first`; NaN if it has none."""
    places = np.where(np.isfinite(values), np.arange(len(values)), -1)
    last = np.maximum.reduceat(places, first)
    return np.where(last >= first, values[np.maximum(last, 0)], np.nan)


def _write_split(attempt: Attempt, split: SplitTable) -> None:
    parts = ClientSplit.objects.filter(job_id=attempt.job_id)
    if parts.exclude(first=split.first).count() >= MAX_PARTS:
        parts.delete()  # another split than before
    values = {
        "clients": len(split.counts),
        "labels": list(split.labels),
        "counts": split.counts.astype("<u4").tobytes(),
    }
    ClientSplit.objects.update_or_create(job_id=attempt.job_id, first=split.first, defaults=values)


def _as_integers(counts: NDArray[np.int64]) -> list[int]:
    """Return counts of samples, no larger than their column takes."""
    return [int(count) for count in np.minimum(counts, _COUNT_LIMIT - 1)]


def _set_column(attempt: Attempt, column: str, first: int, values: Sequence[Any]) -> None:
    """Write one column of the clients from `first` on; what stands there already is not written again."""
    nothing = [0] * (len(_OUTCOMES) + 2)
    bulk.insert_rows(
        Client,
        ("job", "number", column, *_OUTCOMES, "last_attempt", "last_round"),
        ((attempt.job_id, number, value, *nothing) for number, value in enumerate(values, first)),
        f"ON CONFLICT (job_id, number) DO UPDATE SET {column} = excluded.{column}"
        f" WHERE jobs_client.{column} IS NULL OR jobs_client.{column} <> excluded.{column}",
    )


def _number(value: Any) -> float | None:
    """Return a finite number, as databases sort them; None for NaN and the infinities."""
    return float(value) if np.isfinite(value) else None
