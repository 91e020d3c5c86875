"""Text from addresses and forms."""

import pytest

from portal.asked import plain, whole


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0), ("42", 42), ("007", 7), (str(2**63 - 1), 2**63 - 1),
        (str(2**63), None), ("9" * 5000, None), ("²", None), ("٣", None), ("-1", None), ("1.5", None), ("", None),
        (None, None), (" 1", None),
    ],
)  # fmt: skip
def test_whole_numbers_that_a_column_takes(text: str | None, number: int | None) -> None:
    assert whole(text) == number


def test_a_bound_of_ones_own() -> None:
    assert (whole("99", 100), whole("100", 100)) == (99, None)


def test_nul_is_left_out() -> None:
    assert plain("a\0b") == "ab"
