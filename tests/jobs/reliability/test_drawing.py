"""Test the scales of reliability charts."""

from __future__ import annotations

from datetime import date, timedelta

from jobs.failures.charts import HEIGHT, TOP, weeks
from jobs.failures.report import FailureRow
from jobs.reliability.rate import Rate


def test_a_week_that_has_just_begun_does_not_flatten_the_others() -> None:
    monday = date(2026, 11, 2)
    reports = [(12, 150.0), (6, 140.0), (9, 160.0), (4, 1.1)]
    rows = [
        FailureRow(f"week {number}", Rate(failures, node_days), since=monday + timedelta(weeks=number))
        for number, (failures, node_days) in enumerate(reports)
    ]
    drawn = weeks(rows)
    assert drawn is not None
    assert [label for _, label in drawn.scale] == ["0", "50", "100"]
    first, *others, last = drawn.marks
    assert first.y < TOP + HEIGHT / 2
    assert last.y == TOP, "it stands at the edge"
    assert last.is_cut, "and marks that its interval goes on"
    for mark in (first, *others):
        assert TOP < mark.high < mark.y < mark.low <= TOP + HEIGHT, "of the others the whole interval is shown"
        assert not mark.is_cut
    assert last.title.startswith("Week of 23")
