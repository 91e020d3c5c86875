"""Add to stored readings of a state when nobody read it: its agent was silent.

Live evaluation judges the newest values until the agent counts as silent. If it then reads nothing for another GAP_S,
the state is unknown (`engine.advance_unread`), as if it had been read without values.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from nodes.health.engine import GAP_S
from nodes.health.progress import Observation
from nodes.health.readings import Flags, Floats, StateReadings
from nodes.models.telemetry import SILENT

SILENT_S = SILENT.total_seconds()


def with_silences(readings: StateReadings, stretches: Floats, until: float) -> StateReadings:
    """Return the readings with one without values wherever a silence began.

    `stretches` are rows of a beginning and an end, in order, between which readings that change nothing were left out:
    a silence within one of them is not noticed.
    """
    at = readings.at
    if not len(at):
        return readings
    following = np.append(at[1:], max(until, float(at[-1])))
    silences = np.flatnonzero(following - at > SILENT_S + GAP_S)
    silences = silences[~_are_within(stretches, at[silences], following[silences])]
    if not len(silences):
        return readings
    new_at = np.insert(at, silences + 1, at[silences] + SILENT_S)
    origin = np.insert(np.arange(len(at)), silences + 1, -1)

    def with_none(flags: Flags) -> Flags:
        return np.insert(flags, silences + 1, False)

    def observation(place: int) -> Observation:
        if origin[place] >= 0:
            return readings.observation(int(origin[place]))
        return replace(readings.observation(int(origin[place - 1])), at=float(new_at[place]), fields={})

    matches = {number: with_none(flags) for number, flags in readings.matches.items()}
    return StateReadings(new_at, matches, with_none(readings.is_good), observation)


def _are_within(stretches: Floats, starts: Floats, ends: Floats) -> Flags:
    """Return which of these periods lie within a stretch."""
    if not len(stretches):
        return np.zeros(len(starts), np.bool_)
    last_end = np.maximum.accumulate(stretches[:, 1])
    place = stretches[:, 0].searchsorted(starts, "right") - 1
    return (place >= 0) & (last_end[place] >= ends)
