"""Store events of machines: equal events close in time become one row with a count, lasting ones an open row.

The events of a post are folded in memory, against the rows that they may belong to, and written by a few statements:
a post may bring 2,000, and every other writer waits for it.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from hashlib import blake2b
from typing import Any, Self

from django.db.models import QuerySet

from nodes.models import Agent, Gpu, NodeEvent
from nodes.telemetry import warn
from nodes.telemetry.daily_limit import DailyRowLimit
from nodes.telemetry.machines import bounded
from nodes.telemetry.wire import MachineEvent
from portal import bulk
from vigil_core import untrusted

MAX_PER_DAY = 5_000  # rows of one machine
MAX_OLD = 20 * MAX_PER_DAY  # rows for events of past days
MAX_COUNT = 10**6  # in one report, so that sums fit the column
NEAR = timedelta(minutes=10)  # equal events further apart are two
OPENS = {"gpu.lost": "gpu.back", "gpu.silent": "gpu.answers", "mount.slow": "mount.well"}
CLOSES = {closing: opening for opening, closing in OPENS.items()}
FROM_KERNEL = frozenset({"xid", "sxid"})
PLANTINGS = frozenset({"fault.planted", "fault.refused"})  # each is about one request of a game day
# Rows that a post's events may belong to, the newest: an honest machine has one or two for each event.
CANDIDATES = 2_000

_DIGITS = re.compile(r"0x[0-9a-f]+|\d+", re.IGNORECASE)
_CHANGED = ("count", "at", "last_at", "is_open", "is_confirmed", "first_seq", "last_seq")
EventKey = tuple[str, str]  # fingerprint and boot


def store(agent: Agent, happenings: Sequence[MachineEvent], boot_id: str) -> bool:
    """Store a post's events in their order; return whether the agent's place in the kernel log has moved.

    The caller holds the agent's row lock.
    """
    if not happenings:
        return False
    before = agent.kernel_seq
    folding = _Folding.read(agent, [_EventReport.of(event, boot_id) for event in happenings])
    folding.fold()
    folding.write()
    return agent.kernel_seq != before


@dataclass(frozen=True)
class _EventReport:
    """An event in the types of its row."""

    gpu: str
    kind: str
    code: int | None
    text: str
    at: datetime
    since: datetime | None
    last_at: datetime | None
    count: int
    first_seq: int | None  # in the kernel log; None: not from there
    last_seq: int | None
    boot_id: str
    is_again: bool  # sent again: its original batch was discarded
    is_confirmed: bool
    mount: str
    fingerprint: str
    data: dict[str, Any]

    @classmethod
    def of(cls, event: MachineEvent, boot_id: str) -> Self:
        more, of_kernel = event.more, event.kind in FROM_KERNEL
        number = more.get("planted") if event.kind in PLANTINGS else more.get("xid", more.get("sxid"))
        code = untrusted.count(number, 2**31)
        text, mount = untrusted.line(more.get("text"), 1_000), untrusted.line(more.get("mount"), 300)
        first = untrusted.count(more.get("seq")) if of_kernel else None
        last = untrusted.count(more.get("last_seq", more.get("seq"))) if of_kernel else None
        is_again, opening = more.get("again") is True, CLOSES.get(event.kind)
        port = untrusted.line(more.get("port"), 64) if event.kind == "link.down" else ""
        about = mount if opening else mount or text  # an end only names what it is about
        since, last_at = (untrusted.number(more.get(name), untrusted.MAX_UNIX_TIME) for name in ("since", "last_at"))
        return cls(
            gpu=event.gpu or "",
            kind=event.kind,
            code=code,
            text=text,
            at=_moment(event.at),
            since=_moment(since) if since else None,
            last_at=_moment(last_at) if last_at else None,
            count=min(untrusted.count(more.get("count")) or 1, MAX_COUNT),
            first_seq=first if last is not None else None,
            last_seq=last if first is not None else None,
            boot_id=untrusted.name(more.get("boot_id"), 64) or boot_id if is_again else boot_id,
            is_again=is_again,
            is_confirmed=more.get("confirmed") is True,
            mount=mount,
            fingerprint=fingerprint(opening or event.kind, event.gpu or port, None if opening else code, about),
            data=more,
        )

    @property
    def key(self) -> EventKey:
        return self.fingerprint, self.boot_id

    @property
    def lasts(self) -> bool:
        return self.kind in OPENS

    @property
    def begins_at(self) -> datetime:
        return self.since if self.lasts and self.since else self.at


class _Rows:
    """Rows of one fingerprint and boot, found by time and by position in the kernel log.

    Rows of a key are apart, because close events join one row: the last row that begins before a moment is the
    candidate.
    """

    def __init__(self) -> None:
        self.by_time: list[NodeEvent] = []
        self.open: list[NodeEvent] = []
        self.by_seq: list[NodeEvent] = []

    def add(self, row: NodeEvent) -> None:
        insort(self.by_time, row, key=_at)
        if row.is_open:
            insort(self.open, row, key=_at)
        if row.first_seq is not None and row.last_seq is not None:
            insort(self.by_seq, row, key=_first_seq)

    def remove(self, row: NodeEvent) -> None:
        """Remove a row whose position is about to change."""
        _remove(self.by_time, row, _at)
        if row.first_seq is not None and row.last_seq is not None:
            _remove(self.by_seq, row, _first_seq)

    def near(self, at: datetime, *, is_open: bool) -> NodeEvent | None:
        rows = self.open if is_open else self.by_time
        place = bisect_right(rows, at + NEAR, key=_at)
        found = rows[place - 1] if place else None
        return found if found is not None and found.last_at >= at - NEAR else None

    def with_records(self, first: int, last: int) -> NodeEvent | None:
        """Return the row that already counts these kernel log records."""
        place = bisect_right(self.by_seq, first, key=_first_seq)
        found = self.by_seq[place - 1] if place else None
        return found if found is not None and (found.last_seq or 0) >= last else None


@dataclass
class _Folding:
    """A post's events and the rows that they may belong to."""

    agent: Agent
    reports: Sequence[_EventReport]
    rows: dict[EventKey, _Rows]
    gpus: dict[str, Gpu]
    lost: dict[str, Gpu] = field(default_factory=dict)
    """GPUs that were lost or came back."""
    new: list[NodeEvent] = field(default_factory=list)
    changed: dict[int, NodeEvent] = field(default_factory=dict)
    left_out: int = 0

    @classmethod
    def read(cls, agent: Agent, reports: Sequence[_EventReport]) -> Self:
        names = {report.gpu for report in reports if report.gpu}
        gpus = Gpu.objects.filter(agent=agent, uuid__in=names).only("uuid", "lost_at", "gone_at") if names else ()
        rows: dict[EventKey, _Rows] = defaultdict(_Rows)
        for row in {row.pk: row for row in _candidates(agent, reports)}.values():
            rows[row.fingerprint, row.boot_id].add(row)
        return cls(agent, reports, rows, {gpu.uuid: gpu for gpu in gpus})

    def fold(self) -> None:
        for report in self.reports:
            if report.kind in CLOSES:
                self._close(report)
            elif report.last_seq is None or not self._is_counted(report):
                self._open_or_add(report)
            seq, is_of_boot = report.last_seq, report.boot_id == self.agent.boot_id
            if seq is not None and is_of_boot and seq > self.agent.kernel_seq:
                self.agent.kernel_seq = seq

    def write(self) -> None:
        NodeEvent.objects.bulk_create(self.new)
        bulk.update_rows(list(self.changed.values()), _CHANGED)
        bulk.update_rows(list(self.lost.values()), ("lost_at",))
        if self.left_out:
            text = "%s: more than %d different events within a day: %d of a post are left out (logged once an hour)"
            warn.once(("events", self.agent.pk), text, self.agent, MAX_PER_DAY, self.left_out)

    def _is_counted(self, report: _EventReport) -> bool:
        """Return whether these kernel log records are counted already: then only NVML's confirmation may be new.

        An agent that lost its state reads the log from its beginning. Events of discarded batches that it sends again
        may have been stored or not: the row tells.
        """
        assert report.first_seq is not None
        assert report.last_seq is not None
        is_old = report.boot_id == self.agent.boot_id and report.last_seq <= self.agent.kernel_seq
        if not (is_old or report.is_again):
            return False
        row = self.rows[report.key].with_records(report.first_seq, report.last_seq)
        if row is not None and report.is_confirmed and not row.is_confirmed:
            row.is_confirmed = True
            self._note_changed(row)
        return row is not None or not report.is_again

    def _open_or_add(self, report: _EventReport) -> None:
        rows, at = self.rows[report.key], report.begins_at
        last_at = max(at, report.last_at or report.at)
        before = rows.near(at, is_open=report.lasts)
        if before is None:
            self._open(report, at, last_at)
        elif not report.lasts:
            rows.remove(before)
            before.count += report.count
            before.at, before.last_at = min(before.at, at), max(before.last_at, last_at)
            before.is_confirmed = before.is_confirmed or report.is_confirmed
            before.first_seq = _extreme(min, before.first_seq, report.first_seq)
            before.last_seq = _extreme(max, before.last_seq, report.last_seq)
            rows.add(before)
            self._note_changed(before)
        gpu = self.gpus.get(report.gpu)
        if gpu is not None and report.kind == "gpu.lost":
            gpu.lost_at = at
            self.lost[gpu.uuid] = gpu

    def _open(self, report: _EventReport, at: datetime, last_at: datetime) -> None:
        if not self._limit.take(at):
            self.left_out += 1
            return
        gpu = self.gpus.get(report.gpu)
        # The same post may report that the GPU was removed: nobody will then report that it is back.
        gone_at = gpu.gone_at if gpu is not None and gpu.gone_at is not None and gpu.gone_at >= at else None
        row = NodeEvent(
            agent=self.agent, gpu=gpu, kind=report.kind, code=report.code, text=report.text, at=at,
            last_at=max(last_at, gone_at or last_at), is_open=report.lasts and gone_at is None, count=report.count,
            is_confirmed=report.is_confirmed, boot_id=report.boot_id, first_seq=report.first_seq,
            last_seq=report.last_seq, fingerprint=report.fingerprint,
            data=bounded(report.data) | self._mounted(report),
        )  # fmt: skip
        self.new.append(row)
        self.rows[report.key].add(row)

    def _close(self, report: _EventReport) -> None:
        for boot in self._boots:  # also what an earlier boot had opened
            rows = self.rows[report.fingerprint, boot]
            for row in rows.open:
                row.is_open, row.last_at = False, max(report.at, row.at)
                self._note_changed(row)
            rows.open = []
        gpu = self.gpus.get(report.gpu)
        if gpu is not None and report.kind == "gpu.back":
            gpu.lost_at = None
            self.lost[gpu.uuid] = gpu

    @cached_property
    def _boots(self) -> set[str]:
        return {boot for _, boot in self.rows} | {report.boot_id for report in self.reports}

    def _note_changed(self, row: NodeEvent) -> None:
        if row.pk is not None:
            self.changed[row.pk] = row

    @cached_property
    def _limit(self) -> DailyRowLimit:
        rows = NodeEvent.objects.filter(agent=self.agent)
        return DailyRowLimit(rows, "at", per_day=MAX_PER_DAY, older=MAX_OLD)

    def _mounted(self, report: _EventReport) -> dict[str, str]:
        """Return the source mounted there, which identifies a file system across machines."""
        return {"source": self._sources[report.mount]} if report.mount in self._sources else {}

    @cached_property
    def _sources(self) -> dict[str, str]:
        """Return the mounts in the machine's facts: source by path."""
        mounts = self.agent.facts.get("mounts")
        found = [mount for mount in mounts if isinstance(mount, dict)] if isinstance(mounts, list) else []
        return {str(mount.get("mount")): untrusted.line(mount.get("source"), 300) for mount in reversed(found)}


def _candidates(agent: Agent, reports: Sequence[_EventReport]) -> Iterator[NodeEvent]:
    """Yield the rows that reports may belong to: near ones, open ones to close, and those of the same records."""
    agent_rows = NodeEvent.objects.filter(agent=agent).only("fingerprint", "boot_id", *_CHANGED)
    adding = [report for report in reports if report.kind not in CLOSES]
    if adding:
        first = min(report.begins_at for report in adding) - NEAR
        last = max(report.begins_at for report in adding) + NEAR
        yield from _with_fingerprints(agent_rows.filter(last_at__gte=first, at__lte=last), adding)
    if closing := [report for report in reports if report.kind in CLOSES]:
        yield from _with_fingerprints(agent_rows.filter(is_open=True), closing)
    if of_kernel := [report for report in adding if report.first_seq is not None and report.last_seq is not None]:
        lowest = min(report.first_seq or 0 for report in of_kernel)
        highest = max(report.last_seq or 0 for report in of_kernel)
        yield from _with_fingerprints(agent_rows.filter(last_seq__gte=lowest, first_seq__lte=highest), of_kernel)


def _with_fingerprints(rows: QuerySet[NodeEvent], reports: Iterable[_EventReport]) -> QuerySet[NodeEvent]:
    marks = {report.fingerprint for report in reports}
    return rows.filter(fingerprint__in=marks).order_by("-last_at")[:CANDIDATES]


def _remove(rows: list[NodeEvent], row: NodeEvent, key: Callable[[NodeEvent], Any]) -> None:
    place = bisect_left(rows, key(row), key=key)
    while rows[place] is not row:
        place += 1
    del rows[place]


def _at(row: NodeEvent) -> datetime:
    return row.at


def _first_seq(row: NodeEvent) -> int:
    return row.first_seq or 0


def _extreme(pick: Callable[[int, int], int], first: int | None, second: int | None) -> int | None:
    return second if first is None else first if second is None else pick(first, second)


def fingerprint(kind: str, gpu: str, code: int | None, text: str) -> str:
    """Return the same value for events that differ only in numbers in their text."""
    identity = "\n".join((kind, gpu, str(code), _DIGITS.sub("#", text)))
    return blake2b(identity.encode(errors="replace"), digest_size=12).hexdigest()


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)
