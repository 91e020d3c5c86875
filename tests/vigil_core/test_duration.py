"""Test durations such as 90m, of rules, job specifications and the command line."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vigil_core import duration


@given(st.integers(0, duration.LONGEST_S))
def test_durations_are_written_as_they_are_read(seconds: int) -> None:
    assert duration.parse(duration.write(seconds)) == seconds


@pytest.mark.parametrize(("text", "seconds"), [("30s", 30), ("90m", 5_400), ("48h", 172_800), ("366d", 366 * 86_400)])
def test_every_unit(text: str, seconds: int) -> None:
    assert duration.parse(text) == seconds


@pytest.mark.parametrize("text", ["", "10", "m", "-5m", "1e3m", "5 m", "5M", "²h", "٣h", "1d2h", None, 5, "9" * 5000])
def test_what_is_no_duration(text: object) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        duration.parse(text)


def test_none_is_longer_than_a_year_wherever_it_is_written() -> None:
    with pytest.raises(ValueError, match="367d is longer than a year"):
        duration.parse("367d")
