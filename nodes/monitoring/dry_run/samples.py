"""Read what telemetry stores of lasting states (temperatures, throttle bits, disks, ports) as observations of a rule.

Samples are stored every second for two days, older ones as the lowest and highest value of each minute. A minute
becomes two observations, first the value that fulfils more of the rule's conditions, then the other: a state that
lasted the whole minute holds on, one that did not is interrupted. Readings are judged by column; which of them the
engine has to see is the matter of nodes.health.readings.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from nodes.health.progress import Observation, Subject
from nodes.health.readings import Flags, StateReadings
from nodes.health.rules.condition import Condition, FieldValue
from nodes.health.rules.rule import Rule
from nodes.models import Agent, Frame
from nodes.monitoring.dry_run.fields import SampledSubject
from nodes.monitoring.dry_run.silences import with_silences
from nodes.monitoring.dry_run.verdicts import ColumnVerdicts, FieldCondition
from nodes.telemetry import frames
from nodes.telemetry.fields import MAX_SPAN_S, PLACE, gpu_owner, host_owner
from nodes.telemetry.thin import MINUTES, thinned
from nodes.telemetry.wire import MISSING
from portal.models import Series
from portal.series import rows as chunk_rows
from portal.series.codec import Floats, Integers, concatenated, decode_merged, last_of_each
from portal.series.read import ids_of
from portal.series.store import Owner

LIVE_S = 10
"""Seconds between two values that live evaluation sees: an agent reports every ten seconds."""


_NO_STRETCHES = np.zeros((0, 2), np.int64)


@dataclass(frozen=True)
class JudgedColumn:
    """Values of one series in order of time (ticks), with their verdicts.

    `stretches` are beginnings and ends between which equal verdicts were left out.
    """

    at: Integers
    value: Floats
    verdict: Integers
    stretches: Integers = field(default_factory=lambda: _NO_STRETCHES)


def needed_fields(rule: Rule, signal: str) -> frozenset[str]:
    """Return the fields of the signal that the rule's conditions name."""
    names = {name for trigger in rule.triggers if trigger.signal.name == signal for name in trigger.where}
    if rule.triggers[0].signal.name == signal:
        names |= set(rule.clearing.where)
    return frozenset(names)


class StoredSamples:
    """The samples of some machines between two moments (Unix seconds), as far as a rule asks for them."""

    def __init__(self, rule: Rule, agents: Sequence[Agent], start: int, end: int) -> None:
        self.rule, self.agents, self.start, self.end = rule, agents, start, end
        self._columns: dict[tuple[Owner, str], _StoredColumn] = {}

    def readings(self, subjects: Sequence[SampledSubject]) -> Iterator[tuple[Subject, StateReadings]]:
        """Yield each subject's readings, in order of time."""
        wanted = defaultdict(list)
        for subject in subjects:
            for series in sorted(self._series(subject)):
                wanted[series].append(subject.owner)
        for series, owners in wanted.items():
            self._columns |= _load(series, list(dict.fromkeys(owners)), self.start, self.end)
        _add_frames(self._columns, [agent.pk for agent in self.agents], self.start, self.end)
        for subject in subjects:
            yield subject.subject, self._readings(subject)

    def _readings(self, subject: SampledSubject) -> StateReadings:
        columns = self._judged(subject)
        found = _SubjectColumns(self.rule, subject, columns).readings()
        stretches = np.concatenate([_NO_STRETCHES, *(column.stretches for column in columns.values())])
        return with_silences(found, stretches[stretches[:, 0].argsort()] / _TICKS, self.end)

    def _series(self, subject: SampledSubject) -> set[str]:
        names = needed_fields(self.rule, subject.signal) & subject.fields.keys()
        # A rule without conditions holds whenever there is a reading.
        return {subject.fields[name][0] for name in names or list(subject.fields)[:1]}

    def _judged(self, subject: SampledSubject) -> dict[str, JudgedColumn]:
        """Return the subject's columns that have values, by series."""
        columns = {}
        for series in sorted(self._series(subject)):
            conditions = conditions_on(self.rule, subject, series)
            verdicts = ColumnVerdicts([item.condition for item in conditions])
            triggers = sum(item.trigger is not None for item in conditions)
            columns[series] = self._columns[subject.owner, series].judged(verdicts, triggers)
        return {series: column for series, column in columns.items() if len(column.at)}


class PlacedCondition(NamedTuple):
    """A condition on one series: of the trigger at this position, or (None) of the clearing."""

    trigger: int | None
    condition: FieldCondition


def conditions_on(rule: Rule, subject: SampledSubject, series: str) -> list[PlacedCondition]:
    """Return the rule's conditions on the fields that come from this series, those of triggers first."""
    fields = {name: convert for name, (source, convert) in subject.fields.items() if source == series}
    found = [
        PlacedCondition(number, FieldCondition(fields[name], condition))
        for number, trigger in enumerate(rule.triggers)
        if trigger.signal.name == subject.signal
        for name, condition in trigger.where.items()
        if name in fields
    ]
    clearing = rule.clearing.where.items()
    return found + [PlacedCondition(None, FieldCondition(fields[n], c)) for n, c in clearing if n in fields]


class _SubjectColumns:
    """The judged columns of one subject, side by side: a field has the value of its column's newest reading."""

    def __init__(self, rule: Rule, subject: SampledSubject, columns: Mapping[str, JudgedColumn]) -> None:
        self.rule, self.subject, self.columns = rule, subject, columns
        self.at, self.places = _aligned([column.at for column in columns.values()])

    def readings(self) -> StateReadings:
        triggers = [n for n, trigger in enumerate(self.rule.triggers) if trigger.signal.name == self.subject.signal]
        matches = {number: self._fulfils(number, self.rule.triggers[number].where) for number in triggers}
        if self.rule.clearing.ending != "recovered":
            is_good = np.zeros(len(self.at), np.bool_)
        elif self.rule.clearing.where:
            is_good = self._fulfils(None, self.rule.clearing.where)
        else:
            is_good = self._are_known({name for number in triggers for name in self.rule.triggers[number].where})
        return StateReadings(self.at / _TICKS, matches, is_good, self._observation)

    def _fulfils(self, trigger: int | None, where: Mapping[str, Condition]) -> Flags:
        """Return at which readings all conditions of a trigger, or (None) of the clearing, hold."""
        found = self._are_known(where.keys())
        for (series, column), places in zip(self.columns.items(), self.places, strict=True):
            placed = conditions_on(self.rule, self.subject, series)
            bits = sum(1 << bit for bit, item in enumerate(placed) if item.trigger == trigger)
            if bits:
                holds = column.verdict & bits == bits
                found &= holds if places is None else holds[places]
        return found

    def _are_known(self, names: Collection[str]) -> Flags:
        """Return at which readings all these fields have a value. Whether one can have any depends on the machine."""
        found = np.ones(len(self.at), np.bool_)
        for name in names:
            series, convert = self.subject.fields.get(name, ("", _unknown))
            column = self.columns.get(series)
            if column is None or convert(float(column.value[0])) is None:
                found[:] = False
            elif column.at[0] > self.at[0]:
                found &= self.at >= column.at[0]
        return found

    def _observation(self, place: int) -> Observation:
        fields: dict[str, FieldValue] = {}
        values = {}
        for (series, column), places in zip(self.columns.items(), self.places, strict=True):
            own = place if places is None else int(places[place])
            values[series] = float(column.value[own]) if own >= 0 else None
        for name, (series, convert) in self.subject.fields.items():
            if series in values:
                value = values[series]
                fields[name] = None if value is None else convert(value)
        return Observation(self.subject.signal, self.subject.subject, float(self.at[place]) / _TICKS, fields)


def _aligned(columns: Sequence[Integers]) -> tuple[Integers, list[Integers | None]]:
    """Return all moments in order, and for each column the place of its newest value at each; None: its own places."""
    if not columns:
        return np.zeros(0, np.int64), []
    if all(np.array_equal(column, columns[0]) for column in columns[1:]):
        return columns[0], [None] * len(columns)
    everything = np.concatenate(columns)
    order = np.argsort(everything, kind="stable")  # merges what is sorted already
    at = everything[order]
    newest = np.append(at[1:] != at[:-1], True)
    ends = np.cumsum([len(column) for column in columns])
    return at[newest], [
        (np.cumsum((order >= end - len(column)) & (order < end)) - 1)[newest]
        for column, end in zip(columns, ends, strict=True)
    ]


def _unknown(_: float) -> FieldValue:
    return None


_TICKS = 2
"""Per second: the two observations of a minute are half a second apart."""


class _StoredColumn:
    """One series of one owner: chunks of minutes (lowest and highest value), of seconds, and what is not merged yet."""

    def __init__(self, start: int, end: int) -> None:
        self.start, self.end = start, end
        self.minutes: list[tuple[_ChunkRow, _ChunkRow]] = []
        self.seconds: list[_ChunkRow] = []
        self.fresh: list[tuple[Integers, Floats]] = []

    def judged(self, verdicts: ColumnVerdicts, triggers: int) -> JudgedColumn:
        parts = [*self._minutes(verdicts, triggers), *self._seconds(verdicts)]
        if self.fresh:
            step, value = (np.concatenate(some) for some in zip(*self.fresh, strict=True))
            parts.append(_judged_values(step, value, verdicts))
        at, value, verdict = (np.concatenate([getattr(part, name) for part in parts]) for name in _COLUMN)
        stretches = np.concatenate([part.stretches for part in parts])
        if (at[1:] > at[:-1]).all():
            return JudgedColumn(at, value, verdict, stretches)
        order = np.argsort(at, kind="stable")
        order = order[np.append(np.diff(at[order]) != 0, True)]  # late values win
        return JudgedColumn(at[order], value[order], verdict[order], stretches)

    def _minutes(self, verdicts: ColumnVerdicts, triggers: int) -> Iterator[JudgedColumn]:
        undecided, whole = [], _WholeChunks()
        for low, high in self.minutes:
            is_odd = low.is_odd or high.is_odd
            code = None if is_odd else verdicts.over(low.low, high.high)
            if code is None:
                undecided.append((low, high))
            else:
                first = max(low.first, self.start) * _TICKS
                whole.add((first, first + 1, low.last * _TICKS + 1), low.low, code)
        yield whole.column()
        if undecided:
            yield self._both_extremes(undecided, verdicts, triggers)

    def _both_extremes(
        self, rows: Sequence[tuple[_ChunkRow, _ChunkRow]], verdicts: ColumnVerdicts, triggers: int
    ) -> JudgedColumn:
        step, lowest = self._decoded([low for low, _ in rows])
        other, highest = self._decoded([high for _, high in rows])
        if not np.array_equal(step, other):  # a value that was not finite in one of them
            step, ours, theirs = np.intersect1d(step, other, return_indices=True)
            lowest, highest = lowest[ours], highest[theirs]
        codes = verdicts.of(lowest), verdicts.of(highest)
        is_low_first = _fulfilled(codes[0], triggers) >= _fulfilled(codes[1], triggers)
        number = 2 * len(step)
        at, value, verdict = np.empty(number, np.int64), np.empty(number), np.empty(number, np.int64)
        at[0::2], at[1::2] = step * _TICKS, step * _TICKS + 1
        value[0::2], value[1::2] = np.where(is_low_first, lowest, highest), np.where(is_low_first, highest, lowest)
        verdict[0::2], verdict[1::2] = np.where(is_low_first, *codes), np.where(is_low_first, *codes[::-1])
        return JudgedColumn(at, value, verdict)

    def _decoded(self, rows: Sequence[_ChunkRow]) -> tuple[Integers, Floats]:
        """Return the finite values of these chunks of minutes."""
        ((_, step, value),) = concatenated([(0, [row.data for row in rows])])
        is_wanted = np.isfinite(value) & (step >= self.start - MINUTES.seconds)
        return (step, value) if is_wanted.all() else (step[is_wanted], value[is_wanted])

    def _seconds(self, verdicts: ColumnVerdicts) -> Iterator[JudgedColumn]:
        undecided, whole = [], _WholeChunks()
        parts: list[tuple[Integers, Floats]] = []
        for row in self.seconds:
            if row.is_odd or row.first < self.start or row.last > self.end:
                parts.append(row.values(self.start, self.end))
            elif (code := verdicts.over(row.low, row.high)) is None:
                undecided.append(row.data)
            else:
                first = min(row.last, row.first // LIVE_S * LIVE_S + LIVE_S - 1)
                second = min(row.last, first + LIVE_S)
                whole.add((first * _TICKS, second * _TICKS, row.last * _TICKS), row.low, code)
        yield whole.column()
        if undecided:
            parts.append(last_of_each(undecided, LIVE_S))
        if parts:
            step, value = (np.concatenate(some) for some in zip(*parts, strict=True))
            yield _judged_values(step, value, verdicts)


_COLUMN = ("at", "value", "verdict")


class _WholeChunks:
    """Collects chunks whose values all have one verdict: of each the first two readings and the last."""

    def __init__(self) -> None:
        self._at: list[int] = []
        self._stretches: list[tuple[int, int]] = []
        self._values: list[float] = []
        self._codes: list[int] = []

    def add(self, at: tuple[int, int, int], value: float, code: int) -> None:
        self._at += at
        self._stretches.append((at[0], at[2]))
        self._values += (value,) * len(at)
        self._codes += (code,) * len(at)

    def column(self) -> JudgedColumn:
        at, codes = (np.array(some, np.int64) for some in (self._at, self._codes))
        stretches = np.array(self._stretches, np.int64).reshape(-1, 2)
        return JudgedColumn(at, np.array(self._values, np.float64), codes, stretches)


class _ChunkRow(NamedTuple):
    """A merged chunk: its extremes, and its data, which is decoded only if they do not decide."""

    first: int
    last: int
    low: float
    high: float
    is_odd: bool
    data: bytes

    def values(self, start: int, end: int) -> tuple[Integers, Floats]:
        points = decode_merged(self.data, times=False)
        is_wanted = np.isfinite(points.value) & (points.step >= start) & (points.step <= end)
        return points.step[is_wanted], points.value[is_wanted]


def _judged_values(step: Integers, value: Floats, verdicts: ColumnVerdicts) -> JudgedColumn:
    """Judge the newest value of each ten seconds: that is what live evaluation sees."""
    if not (step[1:] > step[:-1]).all():
        order = np.argsort(step, kind="stable")
        step, value = step[order], value[order]
    newest = np.flatnonzero(np.append(np.diff(step // LIVE_S) != 0, len(step) > 0))
    step, value = step[newest], value[newest]
    return JudgedColumn(step * _TICKS, value, verdicts.of(value))


def _fulfilled(codes: Integers, triggers: int) -> Integers:
    """Return how many of the triggers' conditions, which are the first, each verdict fulfils."""
    bits = [(codes >> bit) & 1 for bit in range(triggers)]
    return np.sum(bits, axis=0, dtype=np.int64) if bits else np.zeros(len(codes), np.int64)


def _load(series: str, owners: Sequence[Owner], start: int, end: int) -> dict[tuple[Owner, str], _StoredColumn]:
    """Return the owners' columns of this series, chunks undecoded."""
    columns = {(owner, series): _StoredColumn(start, end) for owner in owners}
    by_minutes = thinned(series, MINUTES.seconds)
    low = _chunks(owners, by_minutes, Series.Column.MIN, start - MINUTES.seconds, end)
    high = _chunks(owners, by_minutes, Series.Column.MAX, start - MINUTES.seconds, end)
    exact = _chunks(owners, series, Series.Column.VALUE, start, end)
    for owner in owners:
        column = columns[owner, series]
        by_first = {row.first: row for row in high.get(owner, ())}
        column.minutes = [(row, by_first[row.first]) for row in low.get(owner, ()) if row.first in by_first]
        column.seconds = exact.get(owner, [])
    return columns


def _chunks(owners: Sequence[Owner], name: str, column: str, start: int, end: int) -> dict[Owner, list[_ChunkRow]]:
    places = ids_of(owners, name, column)
    found: dict[Owner, list[_ChunkRow]] = defaultdict(list)
    for series_id, row in chunk_rows.merged_rows(list(places), start, end):
        first, last, low, high, odd, data = row
        is_odd = bool(odd) or low is None
        found[owners[places[series_id]]].append(_ChunkRow(first, last, low or 0.0, high or 0.0, is_odd, data))
    return {owner: _without_shortcuts(rows) for owner, rows in found.items()}


def _without_shortcuts(rows: list[_ChunkRow]) -> list[_ChunkRow]:
    """Where late samples made chunks overlap, decode all: a chunk's ends do not say what lies between."""
    if all(later.first > earlier.last for earlier, later in zip(rows, rows[1:], strict=False)):
        return rows
    return [_ChunkRow(row.first, row.last, row.low, row.high, True, row.data) for row in rows]


def _add_frames(
    columns: Mapping[tuple[Owner, str], _StoredColumn], agent_ids: Sequence[int], start: int, end: int
) -> None:
    """Add what is not merged into chunks yet."""
    names = {name for _, name in columns}
    rows = Frame.objects.filter(agent__in=agent_ids, at__gte=start - MAX_SPAN_S, at__lte=end, until__gt=start)
    for agent_id, data in rows.order_by("agent", "at").values_list("agent", "data").iterator(chunk_size=200):
        frame = frames.decode(bytes(data))
        seconds = frame.seconds
        for name in names:
            host = columns.get((host_owner(agent_id), name))
            if host is not None and name in frame.host and np.isfinite(frame.host[name]):
                host.fresh.append((np.array([frame.at], np.int64), np.array([frame.host[name]])))
            if name not in PLACE:
                continue
            for row, gpu_id in enumerate(frame.gpus):
                column, values = columns.get((gpu_owner(gpu_id), name)), frame.values[PLACE[name], row]
                is_wanted = (values != MISSING) & (seconds >= start) & (seconds <= end)
                if column is not None and is_wanted.any():
                    column.fresh.append((seconds[is_wanted], values[is_wanted].astype(np.float64)))
