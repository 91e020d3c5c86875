"""Store what trainers report: exactly once, by whichever endpoint it arrives and however often (protocols.md §3)."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import msgspec
import numpy as np
from django.db import connection, transaction
from django.db.models import Q
from django.utils import timezone

from jobs import live, restart_incidents
from jobs.intake import checkpoint_events, parts, rounds, wire
from jobs.intake.attempt_progress import AttemptProgress
from jobs.intake.wire import ReportPost, StreamBatches
from jobs.models import Attempt, Event, Stream
from portal import bulk, process_counters
from portal.http.posts import Malformed, inflate
from portal.http.problems import Problem
from portal.models import digest
from portal.series import store
from portal.series.store import NewPoints, Owner

logger = logging.getLogger(__name__)

SERIES = 1_000  # of an attempt
STREAMS = 50_000
EVENTS = 50_000
# A script may report progress once a step and rank: such events have a limit of their own, apart from all others.
PROGRESS, MAX_PROGRESS = "progress", 10_000
QUIET = timedelta(minutes=10)

_ADVANCE = (
    "UPDATE jobs_stream SET next_seq = %s, ended = %s, quarantined = quarantined + %s WHERE id = %s AND next_seq = %s"
)


class AttemptClosed(Exception):
    """The attempt accepts no more reports, or does not exist."""


class ReportResponse(msgspec.Struct):
    """The cursors that a shipper must obey: the seq at which each stream continues, even if lower than before."""

    streams: dict[str, int]
    version: int
    taken: bool = False


def owner_of(attempt_id: int) -> Owner:
    """Return the owner under which an attempt's series are stored."""
    return ("attempt", attempt_id)


def quiet_owners(owners: Set[Owner]) -> set[Owner]:
    """Return the owners whose attempts are closed, or have not reported for long by the portal's clock."""
    ids = {number for kind, number in owners if kind == "attempt"}
    reported_lately = Q(last_report_at__gt=timezone.now() - QUIET)
    reporting: set[int] = set()
    for batch in bulk.batches(list(ids), 1):
        reporting.update(Attempt.objects.open().filter(reported_lately, pk__in=batch).values_list("pk", flat=True))
    return {owner_of(attempt_id) for attempt_id in ids - reporting}


def receive(attempt_id: int, authorization: str, encoding: str, chunks: Iterable[bytes]) -> ReportResponse:
    """Handle POST /attempts/<id>/reports: authorize the sender, parse the body, store it. Raises Problem."""
    authorize(attempt_id, authorization)
    try:
        return ingest(attempt_id, wire.parse(inflate(chunks, encoding)))
    except AttemptClosed:
        raise _invalid_token() from None
    except Malformed as error:
        raise error.problem("malformed-report") from None


def authorize(attempt_id: int, authorization: str) -> None:
    """Raise Problem unless the sender has the token of this attempt and the attempt is open."""
    scheme, _, secret = authorization.partition(" ")
    found = Attempt.objects.open().filter(pk=attempt_id, token_digest=digest(secret))
    if scheme.lower() != "bearer" or not secret or not found.exists():
        raise _invalid_token()


def ingest(attempt_id: int, post: ReportPost, *, seconds: float = bulk.POST_S) -> ReportResponse:
    """Store what is new in a post, once, in a few short transactions that each advance their share of the cursors.

    A stream that does not continue at its cursor is ignored. The answer has the cursor of each stream, also if
    `seconds` were not enough for the whole post: its sender continues from there.
    """
    began = time.monotonic()
    until = began + seconds
    answer: ReportResponse | None = None
    for part in parts.cut(post):
        if answer is not None:
            bulk.give_way(began)
        began = time.monotonic()
        try:
            taken = _ingest_part(attempt_id, part, until)
        except Malformed:
            if answer is None:
                raise
            break  # earlier parts are stored; the post is refused from this part on
        answer = taken if answer is None else _merged(answer, taken)
        if time.monotonic() > until:
            break
    assert answer is not None
    return answer


def _ingest_part(attempt_id: int, post: ReportPost, until: float) -> ReportResponse:
    has_room = not any(event.kind in rounds.KINDS for event in post.events) or rounds.has_room(attempt_id, until)
    began = time.monotonic()
    with transaction.atomic():
        attempt = Attempt.objects.open().filter(pk=attempt_id).for_reports().first()
        if attempt is None:
            raise AttemptClosed(f"attempt {attempt_id} does not accept reports")
        intake = _Intake(attempt, post)
        intake.advance(is_full=not has_room)
        if intake.accepted:
            intake.store()
            transaction.on_commit(partial(process_counters.count_batches, "reports", *intake.counts()))
        if not intake.has_pending:
            transaction.on_commit(intake.publish)
    if intake.has_pending:
        bulk.give_way(began)
        rounds.apply_pending(attempt_id, until)
        transaction.on_commit(intake.publish)  # pages that are notified find the rows
    return ReportResponse(intake.cursors, attempt.version, bool(intake.accepted))


def _merged(answer: ReportResponse, later: ReportResponse) -> ReportResponse:
    return ReportResponse({**answer.streams, **later.streams}, later.version, answer.taken or later.taken)


@dataclass
class _Intake:
    """The intake of one post into one attempt, whose row is locked."""

    attempt: Attempt
    post: ReportPost
    cursors: dict[str, int] = field(default_factory=dict)
    accepted: set[int] = field(default_factory=set)  # indexes into post.streams
    columns: list[NewPoints] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    now: datetime = field(default_factory=timezone.now)
    has_pending: bool = False  # events that are stored, and not yet in the rows of rounds and clients

    def advance(self, *, is_full: bool = False) -> None:
        """Advance the cursors of streams that continue where they stand; the content of others is ignored.

        With `is_full` no cursor advances: the sender learns where they stand, and tries again.
        """
        rows = self._rows()
        bad = _count_bad(self.post)
        moves = []
        for index, part in enumerate(self.post.streams):
            row = rows.get(part.id)
            self.cursors[part.id] = row.next_seq if row else 0
            if is_full or row is None or part.first != row.next_seq or not (part.times or part.end > row.ended):
                continue
            if (row.incarnation, row.rank) != (part.incarnation, part.rank):
                raise Malformed(
                    f"streams.{index}", f"{part.id} is {row.incarnation}.{row.rank}, not {part.incarnation}.{part.rank}"
                )
            after = part.first + len(part.times)
            moves.append((after, part.end or row.ended, bad.get(index, 0), row.pk, part.first))
            self.cursors[part.id] = after
            self.accepted.add(index)
        if moves:
            with connection.cursor() as cursor:
                cursor.executemany(_ADVANCE, moves)
                # Under the attempt's lock no other process can have moved one; if one did, nothing may be stored.
                if cursor.rowcount != len(moves):
                    raise RuntimeError(f"{self.attempt}: a cursor moved under the lock")

    def _rows(self) -> dict[str, Stream]:
        """Return the rows of the post's streams; a new stream gets one."""
        sent = {part.id: part for part in self.post.streams}
        fields = ("uid", "incarnation", "rank", "next_seq", "ended")
        rows = {row.uid: row for row in Stream.objects.filter(attempt=self.attempt, uid__in=sent).only(*fields)}
        begin = [part for part in self.post.streams if part.id not in rows and part.first == 0]
        if not begin:
            return rows
        if Stream.objects.filter(attempt=self.attempt).count() + len(begin) > STREAMS:
            raise Malformed("streams", f"more than {STREAMS} streams in one attempt")
        made = Stream.objects.bulk_create([_stream(self.attempt, part) for part in begin])
        return rows | {row.uid: row for row in made}

    def store(self) -> None:
        """Store everything that the accepted streams brought."""
        self.events = self._reported_events() + self._quarantined()
        self._store_points()
        self._store_events()
        progress = AttemptProgress.from_attempt(self.attempt)
        for fresh in self.columns:
            progress.add_points(fresh.name, fresh.incarnation, *_of_rank_0(fresh))
        for event in self.events:
            progress.add_event(event.kind, event.incarnation, event.rank, event.data)
        self.attempt.version += 1
        now = timezone.now()
        pace = AttemptProgress.pace(self.attempt, progress.step, now)
        Attempt.objects.filter(pk=self.attempt.pk).update(
            version=self.attempt.version, last_report_at=now, **pace, **progress.apply_to(self.attempt)
        )

    def counts(self) -> tuple[int, int]:
        """Return how many batches and points were accepted."""
        batches = sum(len(self.post.streams[index].times) for index in self.accepted)
        return batches, sum(len(fresh.step) for fresh in self.columns)

    def _store_points(self) -> None:
        names = [name for name, sent in self.post.series.items() if any(map(self._accepts, sent.runs))]
        if not names:
            return
        # Their rows come first: a post may name 50,000 series, more than an attempt may have.
        ids = store.declare(owner_of(self.attempt.pk), names, limit=SERIES)
        if len(ids) < len(names):
            left_out = [name for name in names if name not in ids]
            self._note_once("report.too_many_series", {"limit": SERIES, "first_left_out": left_out[0]})
        self.columns = [
            fresh for name in names if name in ids for fresh in self._fresh_columns(name, self.post.series[name])
        ]
        store.append(ids, self.columns)

    def _fresh_columns(self, name: str, sent: wire.SeriesColumns) -> Iterator[NewPoints]:
        """Yield one series' points of accepted streams and good batches: by incarnation, launchers apart."""
        parts = self.post.streams
        kinds = [
            (parts[run[0]].incarnation, parts[run[0]].rank < 0) if self._accepts(run) else None for run in sent.runs
        ]
        for kind in sorted({kind for kind in kinds if kind is not None}):
            is_of_kind = [run_kind == kind for run_kind in kinds]
            runs = [
                (parts[stream].rank, min(parts[stream].times[batch], self.now.timestamp()), count)
                for (stream, batch, count), is_selected in zip(sent.runs, is_of_kind, strict=True)
                if is_selected
            ]
            step, value = sent.step, sent.value
            if not all(is_of_kind):
                mask = np.repeat(is_of_kind, [run[2] for run in sent.runs])
                step, value = step[mask], value[mask]
            yield NewPoints(name, kind[0], runs, step, value)

    def _accepts(self, run: tuple[int, int, int]) -> bool:
        return run[0] in self.accepted and run[:2] not in self.post.bad

    def _reported_events(self) -> list[Event]:
        """Return the events of accepted streams and good batches; of progress only each stream's last."""
        good = [
            happening
            for happening in self.post.events
            if happening.batch[0] in self.accepted and happening.batch not in self.post.bad
        ]
        last = {happening.batch[0]: i for i, happening in enumerate(good) if happening.kind == PROGRESS}
        return [
            self._event(happening.kind, happening.time, self.post.streams[happening.batch[0]], happening.data)
            for i, happening in enumerate(good)
            if happening.kind != PROGRESS or last[happening.batch[0]] == i
        ]

    def _quarantined(self) -> list[Event]:
        """Return one event per stream for its batches with bad content."""
        first: dict[int, tuple[int, str]] = {}
        counts: dict[int, int] = {}
        for (stream, batch), reason in self.post.bad.items():
            if stream in self.accepted:
                first.setdefault(stream, (batch, reason))
                counts[stream] = counts.get(stream, 0) + 1
        events = []
        for stream, (batch, reason) in first.items():
            part = self.post.streams[stream]
            data = {"batches": counts[stream], "seq": part.first + batch, "reason": reason[:500]}
            events.append(self._event("report.quarantined", part.times[batch], part, wire.without_nul(data)))
        return events

    def _event(self, kind: str, time: float, part: StreamBatches, data: dict[str, Any]) -> Event:
        at = min(datetime.fromtimestamp(time, UTC), self.now)  # the job's own clock: nothing has happened tomorrow
        return Event(attempt=self.attempt, time=at, kind=kind, rank=part.rank, incarnation=part.incarnation, data=data)

    def _store_events(self) -> None:
        if not self.events:
            return
        stored = Event.objects.filter(attempt=self.attempt)
        stored_progress = stored.filter(kind=PROGRESS).count()
        progress = [event for event in self.events if event.kind == PROGRESS]
        others = [event for event in self.events if event.kind != PROGRESS]
        room = max(0, EVENTS - (stored.count() - stored_progress))
        if len(others) > room:
            self._note_once("report.too_many_events", {"limit": EVENTS})
            left_out = set(map(id, others[room:]))
            others = others[:room]
            self.events = [event for event in self.events if id(event) not in left_out]
        Event.objects.bulk_create([*others, *progress[: max(0, MAX_PROGRESS - stored_progress)]])
        self.has_pending = rounds.note_pending(self.attempt, others)
        reported = [_as_report(event) for event in others]
        checkpoint_events.apply(self.attempt, reported)
        restart_incidents.note_events(self.attempt, reported)

    def _note_once(self, kind: str, data: Mapping[str, Any]) -> None:
        if not Event.objects.filter(attempt=self.attempt, kind=kind).exists():
            Event.objects.create(attempt=self.attempt, time=timezone.now(), kind=kind, data=dict(data))

    def publish(self) -> None:
        if not self.accepted:
            return
        for event in self.events:
            if rounds.is_pending(self.attempt, event):
                event.data = rounds.summary_of(event)
        live.publish(self.attempt, self.columns, self.events)


def _stream(attempt: Attempt, part: StreamBatches) -> Stream:
    return Stream(
        attempt=attempt,
        uid=part.id,
        incarnation=part.incarnation,
        rank=part.rank,
        node=part.node,
        boot_id=part.boot_id,
        restart_count=part.restart_count,
    )


def _count_bad(post: ReportPost) -> dict[int, int]:
    """Return the number of quarantined batches by stream: bad content, or damaged according to the spool's reader."""
    damaged = {event.batch for event in post.events if event.kind == "report.damaged"}
    counts: dict[int, int] = {}
    for stream, _ in post.bad.keys() | damaged:
        counts[stream] = counts.get(stream, 0) + 1
    return counts


def _of_rank_0(fresh: NewPoints) -> tuple[Any, Any]:
    """Return steps and values of rank 0, in order of arrival."""
    if all(run[0] == 0 for run in fresh.runs):
        return fresh.step, fresh.value
    mask = np.repeat([run[0] == 0 for run in fresh.runs], [run[2] for run in fresh.runs])
    return fresh.step[mask], fresh.value[mask]


def _as_report(event: Event) -> dict[str, Any]:
    return {**event.data, "kind": event.kind, "time": event.time.timestamp()}


def _invalid_token() -> Problem:
    return Problem(
        401,
        "This attempt does not accept reports with this token: it has ended, or the token belongs to another one.",
        kind="unauthorized",
        headers={"WWW-Authenticate": 'Bearer realm="Vigil"'},
    )
