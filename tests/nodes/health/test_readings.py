"""A state that was read very often is replayed by few readings: the entries are those of all of them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nodes.health.progress import Observation, Subject
from nodes.health.readings import StateReadings, replay_readings
from nodes.health.replay import RepairStep, ReplayedEntry, Step, replay
from nodes.health.rules.rule import Rule, parse_rules
from tests.examples import examples

SUBJECT = Subject("dgx-01", "GPU-1")
START = 1_700_000_000
RULE = """
[[rule]]
name = "hot"
title = "Hot"
source = "a test"
severity = "warning"
action = "watch"
burn_in = {burn_in}
clears = "{clears}"
{after}
{good}
escalates = {{ count = 3, within = "1h", action = "drain" }}
{triggers}
"""
TRIGGER = """
[[rule.trigger]]
signal = "gpu_samples"
where = {{ {where} }}
{lasting}
"""
WHERE = ("temperature_c = '>= 2'", "watts = '>= 1'", "temperature_c = '>= 1', watts = 1", "temperature_c = 3")
Row = tuple[int, int | None, int]
"""Seconds since the reading before, temperature, watts."""

readings_of_gpus = st.lists(
    st.tuples(st.sampled_from([1, 10, 10, 10, 20, 40]), st.sampled_from([0, 0, 1, 2, 3, None]), st.integers(0, 1)),
    max_size=60,
)


@st.composite
def rules(draw: st.DrawFn) -> Rule:
    clears = draw(st.sampled_from(["recovered", "recovered", "recovered", "reset", "boot", "person", "burn-in"]))
    after = draw(st.sampled_from([10, 20, 60, 100]))
    good = draw(st.sampled_from(["", "{ temperature_c = '<= 0' }"])) if clears == "recovered" else ""
    triggers = [
        TRIGGER.format(where=where, lasting=f'for = "{seconds}s"' if seconds else "")
        for where, seconds in draw(
            st.lists(st.tuples(st.sampled_from(WHERE), st.sampled_from([0, 10, 30, 70])), min_size=1, max_size=3)
        )
    ]
    text = RULE.format(
        burn_in=str(draw(st.sampled_from([False, False, False, True]))).lower(),
        clears=clears,
        after=f'clears_after = "{after}s"' if clears in ("recovered", "reset", "boot") else "",
        good=f"clears_where = {good}" if good else "",
        triggers="".join(triggers),
    )
    (rule,) = parse_rules(text)
    return rule


def observations_of(rows: Sequence[Row]) -> list[Observation]:
    at, found = START, []
    for seconds, temperature, watts in rows:
        at += seconds
        found.append(Observation("gpu_samples", SUBJECT, at, {"temperature_c": temperature, "watts": watts}))
    return found


def readings_of(rule: Rule, observations: Sequence[Observation]) -> StateReadings:
    def is_good(observation: Observation) -> bool:
        fields = observation.fields
        if where := rule.clearing.where:
            return all(condition.holds(fields.get(name)) for name, condition in where.items())
        return all(fields.get(name) is not None for trigger in rule.triggers for name in trigger.where)

    return StateReadings(
        at=np.array([o.at for o in observations], np.float64),
        matches={
            number: np.array([trigger.matches(o.signal, o.fields) for o in observations], bool)
            for number, trigger in enumerate(rule.triggers)
        },
        is_good=np.array([is_good(o) for o in observations], bool),
        observation=lambda place: observations[place],
    )


@settings(max_examples=examples(600), deadline=None)
@given(rules(), readings_of_gpus, st.lists(st.integers(0, 900), max_size=4), st.integers(0, 200))
def test_entries_are_those_of_all_readings(rule: Rule, rows: list[Row], repaired: list[int], more: int) -> None:
    observations = observations_of(rows)
    repairs = [RepairStep(START + seconds, "boot" if seconds % 2 else "reset") for seconds in sorted(repaired)]
    until = max([START, *(o.at for o in observations), *(repair.at for repair in repairs)]) + more
    expected = list(replay(rule, SUBJECT, in_order(observations, repairs), until))
    readings = readings_of(rule, observations)
    assert list(replay_readings(rule, SUBJECT, readings, repairs, until)) == expected
    edges = replay(rule, SUBJECT, in_order(list(readings.edges()), repairs), until)
    assert [times(entry) for entry in edges] == [times(entry) for entry in expected]


def in_order(observations: Sequence[Observation], repairs: Sequence[RepairStep]) -> list[Step]:
    return sorted([*observations, *repairs], key=attrgetter("at"))


def times(entry: ReplayedEntry) -> tuple[float, float | None, str, int]:
    return entry.opened_at, entry.cleared_at, entry.action, entry.count


@pytest.mark.parametrize(("lasting", "most"), [("1h", 0), ("30s", 10)])
def test_a_threshold_that_is_crossed_all_the_time_costs_few_observations(lasting: str, most: int) -> None:
    trigger = TRIGGER.format(where=WHERE[0], lasting=f'for = "{lasting}"')
    (rule,) = parse_rules(
        RULE.format(burn_in="false", clears="recovered", after='clears_after = "1h"', good="", triggers=trigger)
    )
    observations = observations_of([(10, 3 * (number % 7 > 1), 0) for number in range(10_000)])
    created: list[int] = []

    def observation(place: int) -> Observation:
        created.append(place)
        return observations[place]

    readings = readings_of(rule, observations)
    counted = StateReadings(readings.at, readings.matches, readings.is_good, observation)
    found = list(replay_readings(rule, SUBJECT, counted, (), START + 100_000))
    assert len(found) == (1 if most else 0)
    assert len(created) <= most
