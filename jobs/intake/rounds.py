"""What a federation's server tells of rounds and clients, made into rows: once a post, and without trust.

A table that can't be what our server packs is left as the event that it came in. What is read is kept in rows, and the
event keeps only what it was about.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import numpy as np
from django.db import connection
from numpy.typing import NDArray

from jobs import rounds, starts
from jobs.models import Attempt, ClientSplit, Event, Round
from portal import untrusted
from training.federation.tables import STATES, Names, RoundTable, Split, TableError

ROUNDS, SPLIT, NAMED, STARTED = "round.clients", "clients.split", "clients.named", "run.started"
MOST_ROUNDS = 1_000_000
"""Of a federation, as its configuration has it; and clients:"""
MOST_CLIENTS = 100_000
MOST_PARTS = 2_000
"""Rows of a job's split: 100,000 clients of 64 labels take 1,076."""
_MOST = 2**31
_MOST_BYTES = 2**53
_FIELDS = [f.name for f in Round._meta.concrete_fields if f.name not in {"id", "attempt", "number"}]

_DID = ("trained", "late", "dropped", "rejected", "broken", "timed", "seconds_sum")
_IS_NEWER = "(excluded.last_attempt, excluded.last_round) >= (jobs_client.last_attempt, jobs_client.last_round)"
_COUNT_CLIENTS = f"""
    INSERT INTO jobs_client (job_id, number, {", ".join(_DID)}, loss, accuracy, last_attempt, last_round)
    VALUES ({", ".join(["%s"] * (len(_DID) + 6))})
    ON CONFLICT (job_id, number) DO UPDATE SET
        {", ".join(f"{name} = jobs_client.{name} + excluded.{name}" for name in _DID)},
        loss = CASE WHEN {_IS_NEWER} THEN COALESCE(excluded.loss, jobs_client.loss)
            ELSE COALESCE(jobs_client.loss, excluded.loss) END,
        accuracy = CASE WHEN {_IS_NEWER} THEN COALESCE(excluded.accuracy, jobs_client.accuracy)
            ELSE COALESCE(jobs_client.accuracy, excluded.accuracy) END,
        last_round = CASE WHEN {_IS_NEWER} THEN excluded.last_round ELSE jobs_client.last_round END,
        last_attempt = CASE WHEN {_IS_NEWER} THEN excluded.last_attempt ELSE jobs_client.last_attempt END
"""
_SIZE_CLIENTS = f"""
    INSERT INTO jobs_client (job_id, number, samples, {", ".join(_DID)}, last_attempt, last_round)
    VALUES (%s, %s, %s, {", ".join(["0"] * (len(_DID) + 2))})
    ON CONFLICT (job_id, number) DO UPDATE SET samples = excluded.samples
"""
_NAME_CLIENTS = f"""
    INSERT INTO jobs_client (job_id, number, name, {", ".join(_DID)}, last_attempt, last_round)
    VALUES (%s, %s, %s, {", ".join(["0"] * (len(_DID) + 2))})
    ON CONFLICT (job_id, number) DO UPDATE SET name = excluded.name
"""


@dataclass
class Told:
    """What a post brought: tables, when and by which incarnation they were told, splits, names, where ranks began."""

    tables: list[tuple[datetime, int, RoundTable]] = field(default_factory=list)
    splits: list[Split] = field(default_factory=list)
    names: list[Names] = field(default_factory=list)
    begun: dict[int, int] = field(default_factory=dict)
    """By incarnation the round that it went on from."""


def read(attempt: Attempt, events: Iterable[Event]) -> Told:
    """Reads what rank 0 of a federation told; an event that was read keeps only what it was about."""
    told = Told()
    if attempt.job.kind != "federated":
        return told
    for event in events:
        if event.rank != 0 or event.incarnation is None:
            continue
        try:
            if event.kind == ROUNDS:
                table = _checked(RoundTable.unpack(event.data))
                told.tables.append((event.time, event.incarnation, table))
                event.data = {
                    **event.data,
                    "rounds": len(table.rounds["round"]),
                    "clients": len(table.clients["round"]),
                }
            elif event.kind == SPLIT:
                split = Split.unpack(event.data)
                if split.first + len(split.counts) > MOST_CLIENTS:
                    raise TableError("more clients than there can be")
                told.splits.append(split)
                event.data = {**event.data, "counts": len(split.counts)}
            elif event.kind == NAMED:
                some = Names.unpack(event.data)
                if some.first + len(some.names) > MOST_CLIENTS:
                    raise TableError("more clients than there can be")
                told.names.append(some)
                event.data = {**event.data, "names": len(some.names)}
            elif event.kind == STARTED and type(start := event.data.get("start_step")) is int and start >= 0:
                told.begun[event.incarnation] = start
        except TableError:
            continue
    return told


def store(attempt: Attempt, told: Told) -> None:
    """Keeps it. After the events are kept, in their transaction: the attempt's row is locked."""
    for incarnation, start in told.begun.items():  # what an earlier one did beyond is done again
        attempt.rounds.filter(incarnation__lt=incarnation, number__gt=start).delete()
    if told.splits:
        _store_splits(attempt, told.splits)
    if told.names:
        _store_names(attempt, told.names)
    if told.tables:
        limits = _limits(attempt)
        _store_rounds(attempt, told, limits)
        _count_clients(attempt, [table for _, _, table in told.tables])


def _checked(table: RoundTable) -> RoundTable:
    """Within what our columns hold, and a configuration may ask for."""
    each = table.rounds
    if (each["round"] > MOST_ROUNDS).any() or (table.clients["client"] >= MOST_CLIENTS).any():
        raise TableError("more rounds or clients than there can be")
    if any((each[name] >= _MOST).any() for name in STATES) or (each["worst"] >= MOST_CLIENTS).any():
        raise TableError("more clients than there can be")
    if any((each[name] > _MOST_BYTES).any() for name in ("bytes_up", "bytes_down")):
        raise TableError("more bytes than there can be")
    return table


def _limits(attempt: Attempt) -> dict[int, int]:
    """By incarnation the round from which a later one went on: what it did beyond is not of record."""
    begun = {incarnation: step for (_, incarnation), step in starts.steps([attempt], rounds.MOST_STARTS).items()}
    found, limit = {}, MOST_ROUNDS
    for incarnation in sorted(begun, reverse=True):
        found[incarnation] = limit
        limit = min(limit, begun[incarnation])
    return found


def _store_rounds(attempt: Attempt, told: Told, limits: dict[int, int]) -> None:
    rows: dict[int, Round] = {}
    for at, incarnation, table in sorted(told.tables, key=lambda one: one[1]):
        limit = limits.get(incarnation, MOST_ROUNDS)
        rows |= {row.number: row for row in _rows(attempt, at, incarnation, table) if row.number <= limit}
    Round.objects.bulk_create(
        rows.values(), update_conflicts=True, unique_fields=["attempt", "number"], update_fields=_FIELDS
    )


def _rows(attempt: Attempt, at: datetime, incarnation: int, table: RoundTable) -> Iterable[Round]:
    each, clients = table.rounds, table.clients
    named = np.empty(len(clients["round"]), rounds.NAMED)
    for name in rounds.NAMED.names or ():
        named[name] = clients[name]
    named["seconds"][~(named["seconds"] <= untrusted.LONGEST)] = np.nan
    for i, number in enumerate(each["round"].tolist()):
        yield Round(
            attempt=attempt,
            number=number,
            incarnation=incarnation,
            told_at=at,
            **{name: int(each[name][i]) for name in (*STATES, "bytes_up", "bytes_down")},
            seconds=untrusted.duration(float(each["seconds"][i])),
            loss=_number(each["loss"][i]),
            accuracy=_number(each["accuracy"][i]),
            worst=int(each["worst"][i]) if each["worst"][i] >= 0 else None,
            named=rounds.pack(named[clients["round"] == number]),
        )


def _count_clients(attempt: Attempt, tables: Sequence[RoundTable]) -> None:
    """Adds what each client did, and what is known of it since its last round: a row each that was named."""
    columns = {name: np.concatenate([table.clients[name] for table in tables]) for name in tables[0].clients}
    order = np.lexsort((columns["round"], columns["client"]))
    columns = {name: column[order] for name, column in columns.items()}
    numbers, first = np.unique(columns["client"], return_index=True)
    if not len(numbers):
        return
    counts = {state: np.add.reduceat((columns["state"] == i).astype(np.int64), first) for i, state in enumerate(STATES)}
    is_timed = (columns["seconds"] >= 0) & (columns["seconds"] <= untrusted.LONGEST)
    counts["timed"] = np.add.reduceat(is_timed.astype(np.int64), first)
    counts["seconds_sum"] = np.add.reduceat(np.where(is_timed, columns["seconds"], 0).astype(np.float64), first)
    last = np.append(first[1:], len(order)) - 1
    known = {name: _last_known(columns[name], first) for name in ("loss", "accuracy")}
    rows = zip(
        numbers.tolist(),
        *(counts[name].tolist() for name in _DID),
        map(_number, known["loss"]),
        map(_number, known["accuracy"]),
        columns["round"][last].tolist(),
        strict=True,
    )
    values = [(attempt.job_id, *row[:-1], attempt.number, row[-1]) for row in rows]
    with connection.cursor() as cursor:
        cursor.executemany(_COUNT_CLIENTS, values)


def _last_known(values: NDArray[Any], first: NDArray[np.int64]) -> NDArray[Any]:
    """Of each run of values, which begin at `first`, the last that is a number; NaN where none is."""
    places = np.where(np.isfinite(values), np.arange(len(values)), -1)
    last = np.maximum.reduceat(places, first)
    return np.where(last >= first, values[np.maximum(last, 0)], np.nan)


def _store_splits(attempt: Attempt, told: Sequence[Split]) -> None:
    parts = {
        split.first: ClientSplit(
            job_id=attempt.job_id,
            first=split.first,
            clients=len(split.counts),
            labels=list(split.labels),
            counts=split.counts.astype("<u4").tobytes(),
        )
        for split in told
    }
    there = ClientSplit.objects.filter(job_id=attempt.job_id)
    if there.count() + len(parts) > MOST_PARTS:
        there.exclude(first__in=list(parts)).delete()  # another split than before
        parts = dict(sorted(parts.items())[:MOST_PARTS])
    fields = ["clients", "labels", "counts"]
    ClientSplit.objects.bulk_create(
        parts.values(), update_conflicts=True, unique_fields=["job", "first"], update_fields=fields
    )
    sizes = {
        split.first + i: int(min(size, _MOST - 1))
        for split in told
        for i, size in enumerate(split.counts.astype(np.int64).sum(axis=1).tolist())
    }
    with connection.cursor() as cursor:
        cursor.executemany(_SIZE_CLIENTS, [(attempt.job_id, *one) for one in sorted(sizes.items())])


def _store_names(attempt: Attempt, told: Sequence[Names]) -> None:
    names = {some.first + i: name for some in told for i, name in enumerate(some.names)}
    with connection.cursor() as cursor:
        cursor.executemany(_NAME_CLIENTS, [(attempt.job_id, *one) for one in sorted(names.items())])


def _number(value: Any) -> float | None:
    """A finite number, as databases sort them; NaN and the infinities are none."""
    return float(value) if np.isfinite(value) else None
