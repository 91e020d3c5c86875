"""Test untrusted text from addresses and forms, and from jobs' reports."""

from datetime import UTC, datetime

import pytest

from vigil_core.untrusted import count, line, moment, name, number, plain, share, whole


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


def test_a_custom_bound() -> None:
    assert (whole("99", 100), whole("100", 100)) == (99, None)


def test_nul_is_left_out() -> None:
    assert plain("a\0b") == "ab"


@pytest.mark.parametrize("value", [True, False, -1, 2**53, 1.0, "1", None, [1], {}, float("nan")])
def test_what_is_no_count(value: object) -> None:
    assert count(value) is None


@pytest.mark.parametrize("value", [True, -0.1, 1e13, float("nan"), float("inf"), 10**400, "1", None, [1.0]])
def test_what_is_no_number(value: object) -> None:
    assert number(value) is None


def test_valid_values_from_jobs() -> None:
    assert (count(0), count(7, 8), number(3), share(0.5), share(1.01)) == (0, 7, 3.0, 0.5, None)
    assert moment(0) == datetime(1970, 1, 1, tzinfo=UTC)
    assert moment(2**33 + 1) is None


def test_a_line_stays_one_line_and_reads_from_left_to_right() -> None:
    assert line("a\nb\x1b[31m\u202ec\ud800") == "ab[31mc"
    assert (line("abc", 2), line(7), line(None)) == ("ab", "", "")


def test_a_name_is_whole_or_nothing() -> None:
    assert (name("abc", 3), name("abcd", 3), name("a\nb"), name(7)) == ("abc", "", "", "")
