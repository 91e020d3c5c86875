"""Test numbers as pages write them; static/js/words.js follows the same rules."""

from __future__ import annotations

import pytest

from vigil_core import formatting


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.27804, "1.278"),
        (0.08, "0.080"),
        (0.00412, "0.00412"),
        (0.000041, "4.1e−5"),
        (-0.5, "−0.500"),
        (0.0, "0"),
        (float("nan"), "NaN"),
        (None, "–"),
    ],
)
def test_a_small_loss_keeps_three_significant_digits(value: float | None, text: str) -> None:
    assert formatting.loss(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(16 * 60, "16 minutes"), (119 * 60, "119 minutes"), (14.9 * 3600, "14 hours"), (50 * 3600, "2 days")],
)
def test_long_times_are_written_as_people_write_them(seconds: float, text: str) -> None:
    assert formatting.rough_words(seconds).replace(formatting.NBSP, " ") == text
