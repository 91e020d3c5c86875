"""An assessment holds until the next one is overdue, however often rules read it."""

from __future__ import annotations

from datetime import datetime, timedelta

import pytest
from django.utils import timezone

from nodes.health.progress import Subject
from nodes.models import HealthEntry
from nodes.monitoring.assessments import replace
from nodes.monitoring.evaluate import evaluate

pytestmark = pytest.mark.django_db
RACK = Subject("", "", "B")
UNKNOWN = {"above_neighbours_c": None}


def assess_rack(celsius: float, at: datetime) -> None:
    replace("rack_inlet", {RACK: {"above_neighbours_c": celsius}}, UNKNOWN, at)


def read(start: datetime, minutes: int, celsius: float | None = None) -> datetime:
    """Evaluate each minute; with a temperature, after it has been assessed."""
    at = start
    for minute in range(minutes + 1):
        at = start + timedelta(minutes=minute)
        if celsius is not None:
            assess_rack(celsius, at)
        evaluate(at)
    return at


def states() -> list[str]:
    return list(HealthEntry.objects.filter(rule="rack-warm").values_list("state", flat=True))


def test_a_single_reading_is_no_hour() -> None:
    now = timezone.now()
    assess_rack(2.5, now)
    read(now, 65)
    assert states() == []


@pytest.mark.lengthy
def test_a_single_good_reading_ends_nothing() -> None:
    at = read(timezone.now(), 61, celsius=2.5)
    assert states() == ["open"]
    assess_rack(0.0, at)
    at = read(at, 65)
    assert states() == ["open"]
    read(at, 61, celsius=0.0)
    assert states() == ["cleared"]


@pytest.mark.lengthy
def test_five_minutes_between_two_assessments_are_no_gap() -> None:
    start = timezone.now()
    fields = {"ratio": 1.2, "owners": 1, "slow_programs": 4, "slow_share": 1.0, "jobs": 4, "other_nodes": 5}
    replace("step_time", {Subject("dgx-01"): fields}, {}, start)
    evaluate(start)
    assert HealthEntry.objects.open().get().rule == "slow-for-one-person"
    for number in range(14):
        at = start + timedelta(minutes=5 * number)
        replace("step_time", {Subject("dgx-01"): {**fields, "ratio": 1.0}}, {}, at)
        read(at, 4)
    assert not HealthEntry.objects.active().exists()
