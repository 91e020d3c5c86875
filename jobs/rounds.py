"""Read a federation's rounds of record, each as the newest attempt did it, and the packed columns of their rows."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from django.db.models import Q, QuerySet
from numpy.typing import NDArray

from jobs import starting_steps
from jobs.models import Attempt, Client, ClientSplit, Job, Round
from portal.series import read
from portal.series.store import Owner

MAX_STARTS = 1_000
NAMED = np.dtype([("client", "<u4"), ("state", "<u1"), ("loss", "<f4"), ("accuracy", "<f4"), ("seconds", "<f4")])
"""A client in a round; NaN: unknown."""
SENT = ("mib_up", "mib_down")
MAX_BY_NUMBER = 500
"""Maximum number of clients queried by number; beyond that all names are read."""
EXACT = 64
"""Up to this many rows, points are added individually; beyond that by whole rows."""


@dataclass(frozen=True)
class RoundSpan:
    """The rounds of record of one attempt: up to `last`, or all if that is None."""

    attempt: Attempt
    last: int | None


def pack(named: NDArray[np.void]) -> bytes:
    return zlib.compress(named.tobytes(), 1) if len(named) else b""


def unpack(packed: bytes | memoryview) -> NDArray[np.void]:
    """Return what each named client did in a round."""
    body = bytes(packed)
    return np.frombuffer(zlib.decompress(body) if body else b"", NAMED)


def spans(attempts: Sequence[Attempt]) -> list[RoundSpan]:
    """Return the spans of a job's attempts, oldest first: rounds beyond a later attempt's start are not of record."""
    begun = starting_steps.steps(attempts, MAX_STARTS)
    found, limit = [], None
    for attempt in reversed(attempts):
        if limit is None or limit > 0:
            found.append(RoundSpan(attempt, limit))
        starts_of_attempt = [step for (attempt_id, _), step in begun.items() if attempt_id == attempt.pk]
        limit = min([*starts_of_attempt, *([] if limit is None else [limit])], default=None)
    return found[::-1]


def of_record(spanned: Sequence[RoundSpan]) -> QuerySet[Round]:
    """Return the rows of these spans."""
    wanted = Q(pk__in=[])
    for span in spanned:
        upto = {} if span.last is None else {"number__lte": span.last}
        wanted |= Q(attempt=span.attempt, **upto)
    return Round.objects.filter(wanted)


def newest(spanned: Sequence[RoundSpan], most: int, *, before: int | None = None) -> list[Round]:
    """Return the last rows, optionally before a round, oldest first. Reads no further than it must."""
    newest_rounds: list[Round] = []
    for span in reversed(spanned):
        rows = Round.objects.filter(attempt=span.attempt)
        bounds = [bound for bound in (span.last, None if before is None else before - 1) if bound is not None]
        if bounds:
            rows = rows.filter(number__lte=min(bounds))
        newest_rounds += rows.order_by("-number")[: most - len(newest_rounds)]
        if len(newest_rounds) >= most:
            break
    return newest_rounds[::-1]


def names(job: Job, clients: Iterable[int]) -> dict[int, str]:
    """Return the names of those clients that have one."""
    wanted = set(clients)
    rows = Client.objects.filter(job=job).exclude(name="")
    if len(wanted) <= MAX_BY_NUMBER:
        rows = rows.filter(number__in=wanted)
    return {number: name for number, name in rows.values_list("number", "name") if number in wanted}


def evaluation_samples(job: Job, clients: Iterable[int]) -> dict[int, int]:
    """Return on how many samples these clients are evaluated, of those of which that is known."""
    rows = Client.objects.filter(job=job, number__in=set(clients)).values_list("number", "evaluation_samples")
    return {number: samples for number, samples in rows if samples is not None}


def splits(job: Job, clients: Sequence[int]) -> tuple[list[str], dict[int, list[int]]]:
    """Return the labels, and for each of these clients its number of training samples per label, as far as reported."""
    parts = list(ClientSplit.objects.filter(job=job).order_by("first").values_list("pk", "first", "clients"))
    firsts = np.array([first for _, first, _ in parts], np.int64)
    wanted: dict[int, list[int]] = {}
    for client in clients:
        at = int(np.searchsorted(firsts, client, "right")) - 1
        if at >= 0 and client < parts[at][1] + parts[at][2]:
            wanted.setdefault(parts[at][0], []).append(client)
    labels: list[str] = []
    counts_by_client: dict[int, list[int]] = {}
    for part in ClientSplit.objects.filter(pk__in=list(wanted)):
        labels = labels or list(part.labels)
        counts = np.frombuffer(bytes(part.counts), "<u4").reshape(part.clients, -1)
        if list(part.labels) == labels:
            counts_by_client |= {client: counts[client - part.first].tolist() for client in wanted[part.pk]}
    return labels, counts_by_client


def sent_bytes(owners: Sequence[Owner]) -> float | None:
    """Return the bytes sent so far, repeated rounds included; None if nothing was reported."""
    found = [read.stretches(owners, name, points=EXACT)[0].sum for name in SENT]
    totals = [float(np.nansum(sums)) for sums in found if len(sums)]
    return sum(totals) * 2**20 if totals else None
