"""Replay a state that was read very often, while the engine sees only the readings that can change the finding.

A month of a GPU's temperature is 100,000 readings. Most rules are about something that lasts: a threshold that is
crossed for less than the rule's time opens nothing, and a pause that is shorter than its clearing time ends nothing.
So the next reading that matters follows from the finding's state:

    nothing found   the beginning of the next stretch in which a trigger holds for long enough
    watching        a change of what holds, and the readings around the moment at which it opens
    open            the beginning and the end of the next stretch that is good for long enough;
                    after a repair, the next reading in which a trigger holds

The engine decides what follows, so the entries are those of all readings (tests/nodes/health/test_readings.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from nodes.health.progress import Observation, RuleProgress, Subject
from nodes.health.replay import RepairStep, ReplayedEntry, SubjectHistory
from nodes.health.rules.rule import Rule

Flags = NDArray[np.bool_]
Floats = NDArray[np.float64]
Places = NDArray[np.int64]


@dataclass(frozen=True)
class StateReadings:
    """The readings of one state in order of time (Unix seconds), each with what the rule's conditions say about it.

    `matches`: by the position of each trigger on this state, whether a reading fulfils it. `is_good`: whether a reading
    counts as recovered, if no trigger holds. `observation` makes the observation of a reading.
    """

    at: Floats
    matches: Mapping[int, Flags]
    is_good: Flags
    observation: Callable[[int], Observation]

    def edges(self) -> Iterator[Observation]:
        """Yield the observations at which something changes, and those before and after: all that any rule needs."""
        if not len(self.at):
            return
        changes = np.flatnonzero(np.any([flags[1:] != flags[:-1] for flags in self._flags], axis=0)) + 1
        around = np.concatenate(([0, 1], changes - 1, changes, changes + 1, [len(self.at) - 1]))
        for place in np.unique(around[around < len(self.at)]).tolist():
            yield self.observation(place)

    @property
    def _flags(self) -> list[Flags]:
        return [*self.matches.values(), self.is_good]


def replay_readings(
    rule: Rule, subject: Subject, readings: StateReadings, repairs: Sequence[RepairStep], until: float
) -> Iterator[ReplayedEntry]:
    """Yield the entries that `replay` yields for all readings and repairs up to `until`, both in order of time.

    Nothing but these readings may count towards the rule: where events of the subject do, too, use `edges`.
    """
    history, choice = SubjectHistory(rule, subject), _Choice(rule, readings, until)
    position = 0
    for repair in (*repairs, None):
        end = len(readings.at) if repair is None else int(readings.at.searchsorted(repair.at, "right"))
        while (position := min(end, choice.next(history.progress, position, end))) < end:
            yield from history.follow(readings.observation(position))
            position += 1
        if repair is not None:
            yield from history.follow(repair)
    yield from history.end(until)


class _Stretches:
    """Stretches of readings with a flag that last for at least some seconds: until the next reading without it."""

    def __init__(self, flags: Flags, at: Floats, until: float, least_s: float) -> None:
        edges = np.flatnonzero(np.diff(flags, prepend=False, append=False))
        starts, ends = edges[::2], edges[1::2]
        self.at, self.least_s = at, least_s
        self.over_at = np.append(at, max(until, at[-1]) if len(at) else until)
        is_long = at[starts] + least_s <= self.over_at[ends]
        self.starts, self.ends = starts[is_long], ends[is_long]

    def next(self, position: int) -> int:
        """Return the first reading from which on the flag holds for long enough, at this position or later."""
        found = int(self.ends.searchsorted(position, "right"))
        if found < len(self.starts) and self.starts[found] < position:
            if self.at[position] + self.least_s <= self.over_at[self.ends[found]]:
                return position
            found += 1
        return int(self.starts[found]) if found < len(self.starts) else len(self.at)


class _Choice:
    """Chooses the next reading that can change a finding."""

    def __init__(self, rule: Rule, readings: StateReadings, until: float) -> None:
        self.rule, self.readings, self.until = rule, readings, until
        self.number = len(readings.at)

    def next(self, progress: RuleProgress, position: int, end: int) -> int:
        """Return the first reading that matters from `position` on; `end` or more: none before `end` does."""
        if position >= end:
            return end
        if progress.state == "open":
            return self._while_open(progress, position, end)
        return self._while_watching(progress, position) if progress.holding else self._opening(position)

    def _opening(self, position: int) -> int:
        return min((stretches.next(position) for stretches in self._holding), default=self.number)

    def _while_watching(self, progress: RuleProgress, position: int) -> int:
        due = min(since + self.rule.triggers[number].for_s for number, since in progress.holding.items())
        opening = int(self.readings.at.searchsorted(due))
        # The reading before it opens is what is shown as observed.
        return min(_first(self._changes, position, self.number), max(position, opening - 1))

    def _while_open(self, progress: RuleProgress, position: int, end: int) -> int:
        ending = self.rule.clearing.ending
        if self.rule.needs_burn_in or ending in ("burn-in", "person"):
            return self.number
        if ending == "recovered":
            if progress.good_since is not None:
                return _first(self._not_good, position, self.number)
            return self._good.next(position)
        return self._around_repair(progress, position, end)

    def _around_repair(self, progress: RuleProgress, position: int, end: int) -> int:
        """Return what decides whether a repair helped: the last reading before it that holds, and the first after."""
        if progress.holding and not self._any[position]:
            return position
        found = int(self._places.searchsorted(position))
        last = int(self._places.searchsorted(end)) - 1
        if found > last:
            return end
        return int(self._places[found if progress.repaired_at is not None else last])

    @cached_property
    def _holding(self) -> list[_Stretches]:
        return [
            _Stretches(flags, self.readings.at, self.until, self.rule.triggers[number].for_s)
            for number, flags in self.readings.matches.items()
        ]

    @cached_property
    def _any(self) -> Flags:
        flags = list(self.readings.matches.values())
        return flags[0] if len(flags) == 1 else np.any(flags, axis=0)

    @cached_property
    def _places(self) -> Places:
        """The readings in which a trigger holds."""
        return np.flatnonzero(self._any)

    @cached_property
    def _changes(self) -> Places:
        """The readings at which another set of triggers holds than before."""
        changed = [flags[1:] != flags[:-1] for flags in self.readings.matches.values()]
        return np.flatnonzero(np.any(changed, axis=0)) + 1

    @cached_property
    def _good(self) -> _Stretches:
        return _Stretches(self._recovered, self.readings.at, self.until, self.rule.clearing.after_s)

    @cached_property
    def _not_good(self) -> Places:
        return np.flatnonzero(~self._recovered)

    @cached_property
    def _recovered(self) -> Flags:
        return self.readings.is_good & ~self._any


def _first(places: Places, position: int, otherwise: int) -> int:
    found = int(places.searchsorted(position))
    return int(places[found]) if found < len(places) else otherwise
