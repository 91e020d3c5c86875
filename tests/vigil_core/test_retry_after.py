"""Test the forms of the header Retry-After."""

from __future__ import annotations

import time
from email.utils import formatdate

import pytest

from vigil_core.retry_after import seconds_of


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("7", 7.0), (" 0 ", 0.0), ("", None), ("soon", None), ("-3", None), ("9" * 40, None),
     ("Thu, 01 Jan 1970 00:00:00 GMT", 0.0)],
)  # fmt: skip
def test_forms_of_retry_after(value: str, seconds: float | None) -> None:
    assert seconds_of(value) == seconds


def test_retry_after_may_be_a_date() -> None:
    found = seconds_of(formatdate(time.time() + 90, usegmt=True))
    assert found is not None
    assert 30 < found <= 90
