"""Read what telemetry stores of lasting states (temperatures, throttle bits, disks, ports) as observations of a rule.

Samples are stored every second for two days, older ones as the lowest and highest value of each minute. A minute
becomes two observations, first the value that fulfils more of the rule's conditions, then the other: a state that
lasted the whole minute holds on, one that did not is interrupted. Observations whose verdict is that of the one before
change nothing in the engine except when evidence was last seen, and are left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nodes.health.progress import Observation, Subject
from nodes.health.rules.condition import FieldValue
from nodes.health.rules.rule import Rule
from nodes.models import Agent, Frame
from nodes.monitoring.sampled_fields import SampledSubject
from nodes.monitoring.verdicts import ColumnVerdicts, FieldCondition
from nodes.telemetry import frames
from nodes.telemetry.fields import MAX_SPAN_S, PLACE, gpu_owner, host_owner
from nodes.telemetry.thin import MINUTES, thinned
from nodes.telemetry.wire import MISSING
from portal.models import Series
from portal.series import rows as chunk_rows
from portal.series.codec import Floats, Integers, decode_merged
from portal.series.read import ids_of
from portal.series.store import Owner

LIVE_S = 10
"""Seconds between two values that live evaluation sees: an agent reports every ten seconds."""


@dataclass(frozen=True)
class JudgedColumn:
    """Values of one series in order of time, with their verdicts."""

    at: Integers
    value: Floats
    verdict: Integers


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

    def observations(self, subjects: Sequence[SampledSubject]) -> Iterator[tuple[Subject, list[Observation]]]:
        """Yield each subject's observations, in order of time."""
        wanted = defaultdict(list)
        for subject in subjects:
            for series in sorted(self._series(subject)):
                wanted[series].append(subject.owner)
        for series, owners in wanted.items():
            self._columns |= _load(series, list(dict.fromkeys(owners)), self.start, self.end)
        _add_frames(self._columns, [agent.pk for agent in self.agents], self.start, self.end)
        for subject in subjects:
            yield subject.subject, self._observations(subject)

    def _series(self, subject: SampledSubject) -> set[str]:
        names = needed_fields(self.rule, subject.signal) & subject.fields.keys()
        # A rule without conditions holds whenever there is a reading.
        return {subject.fields[name][0] for name in names or list(subject.fields)[:1]}

    def _observations(self, subject: SampledSubject) -> list[Observation]:
        columns = {series: self._judged(subject, series) for series in sorted(self._series(subject))}
        columns = {series: column for series, column in columns.items() if len(column.at)}
        if not columns:
            return []
        names = [name for name, (series, _) in subject.fields.items() if series in columns]
        times = np.unique(np.concatenate([column.at for column in columns.values()]))
        places = {series: np.searchsorted(column.at, times, "right") - 1 for series, column in columns.items()}
        found = []
        for i, at in enumerate(times.tolist()):
            fields: dict[str, FieldValue] = {}
            for name in names:
                series, convert = subject.fields[name]
                place = int(places[series][i])
                fields[name] = convert(float(columns[series].value[place])) if place >= 0 else None
            found.append(Observation(subject.signal, subject.subject, at / _TICKS, fields))
        return found

    def _judged(self, subject: SampledSubject, series: str) -> JudgedColumn:
        """Return the values at which the verdict changes, and the last one before each change."""
        triggers, more = [], []
        for name, (source, convert) in subject.fields.items():
            if source != series:
                continue
            for trigger in self.rule.triggers:
                if trigger.signal.name == subject.signal and name in trigger.where:
                    triggers.append(FieldCondition(convert, trigger.where[name]))
            if name in self.rule.clearing.where:
                more.append(FieldCondition(convert, self.rule.clearing.where[name]))
        column = self._columns[subject.owner, series].judged(ColumnVerdicts([*triggers, *more]), len(triggers))
        if not len(column.at):
            return column
        changes = np.flatnonzero(np.diff(column.verdict)) + 1
        edges = np.unique(np.concatenate(([0], changes, changes - 1, [len(column.at) - 1])))
        return JudgedColumn(column.at[edges], column.value[edges], column.verdict[edges])


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
        parts = [_judged_minutes(low, high, verdicts, triggers, self.start) for low, high in self.minutes]
        parts += [_judged_seconds(row, verdicts, self.start, self.end) for row in self.seconds]
        parts += [_judged_values(step, value, verdicts) for step, value in self.fresh]
        if not parts:
            return JudgedColumn(np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.int64))
        at = np.concatenate([part.at for part in parts])
        order = np.argsort(at, kind="stable")
        at = at[order]
        order = order[np.append(at[1:] != at[:-1], len(at) > 0)]  # late values win
        value, verdict = (np.concatenate([getattr(part, name) for part in parts]) for name in ("value", "verdict"))
        return JudgedColumn(np.concatenate([part.at for part in parts])[order], value[order], verdict[order])


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


def _judged_minutes(
    low: _ChunkRow, high: _ChunkRow, verdicts: ColumnVerdicts, triggers: int, start: int
) -> JudgedColumn:
    if not low.is_odd and not high.is_odd and (code := verdicts.over(low.low, high.high)) is not None:
        return _whole(low, code, start)
    step, lowest = low.values(start - MINUTES.seconds, low.last)
    other, highest = high.values(start - MINUTES.seconds, high.last)
    if len(step) != len(other):  # a value that was not finite in one of them
        step, ours, theirs = np.intersect1d(step, other, return_indices=True)
        lowest, highest = lowest[ours], highest[theirs]
    codes = verdicts.of(lowest), verdicts.of(highest)
    is_low_first = _fulfilled(codes[0], triggers) >= _fulfilled(codes[1], triggers)
    at, value, verdict = np.empty(2 * len(step), np.int64), np.empty(2 * len(step)), np.empty(2 * len(step), np.int64)
    at[0::2], at[1::2] = step * _TICKS, step * _TICKS + 1
    value[0::2], value[1::2] = np.where(is_low_first, lowest, highest), np.where(is_low_first, highest, lowest)
    verdict[0::2], verdict[1::2] = np.where(is_low_first, *codes), np.where(is_low_first, *codes[::-1])
    return JudgedColumn(at, value, verdict)


def _judged_seconds(row: _ChunkRow, verdicts: ColumnVerdicts, start: int, end: int) -> JudgedColumn:
    if not row.is_odd and row.last <= end and (code := verdicts.over(row.low, row.high)) is not None:
        return _whole(row, code, start)
    return _judged_values(*row.values(start, end), verdicts)


def _judged_values(step: Integers, value: Floats, verdicts: ColumnVerdicts) -> JudgedColumn:
    """Judge the newest value of each ten seconds: that is what live evaluation sees."""
    newest = np.flatnonzero(np.append(np.diff(step // LIVE_S) != 0, len(step) > 0))
    step, value = step[newest], value[newest]
    return JudgedColumn(step * _TICKS, value, verdicts.of(value))


def _whole(row: _ChunkRow, code: int, start: int) -> JudgedColumn:
    """Return the ends of a chunk whose values all have one verdict."""
    at = np.array([max(row.first, start), row.last], np.int64) * _TICKS
    return JudgedColumn(at, np.array([row.low, row.low]), np.array([code, code], np.int64))


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
