"""The times at which racks are coolest and warmest are shown only if enough days support them."""

from __future__ import annotations

from datetime import datetime, timedelta

from nodes.presenting.temperatures import DailyPattern, daily_pattern

START = datetime(2026, 3, 2)


def hours(number: int, base: float = 21.0, warm: float = 2.0, first: int = 0) -> list[tuple[datetime, float]]:
    """Return hours that are `warm` warmer at 15:00 and coolest at 05:00."""
    moments = [START + timedelta(hours=first + place) for place in range(number)]
    return [(at, base + {15: warm, 5: -1.0}.get(at.hour, 0.0)) for at in moments]


def test_a_pattern_needs_every_hour_on_three_days() -> None:
    assert daily_pattern({}) is None
    assert daily_pattern({"A": hours(6)}) is None
    assert daily_pattern({"A": hours(71)}) is None
    assert daily_pattern({"A": hours(72)}) == DailyPattern(5, 15, 3.0, 3)


def test_hours_that_are_alike_are_no_pattern() -> None:
    alike = [(at, 21.0 + 0.4 * (at.hour == 15)) for at, _ in hours(10 * 24)]
    assert daily_pattern({"A": alike}) is None


def test_a_warm_rack_that_is_measured_at_night_only_shifts_nothing() -> None:
    night = [(at, 40.0) for at, _ in hours(10 * 24) if at.hour < 6]
    assert daily_pattern({"A": hours(10 * 24), "B": night}) == DailyPattern(5, 15, 3.0, 10)


def test_racks_count_by_their_differences() -> None:
    assert daily_pattern({"A": hours(4 * 24), "B": hours(3 * 24, base=35.0, warm=0.0)}) == DailyPattern(5, 15, 2.0, 4)
