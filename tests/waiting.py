"""Wait for the conditions of a test, never for a time that might be long enough."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE_S = 120.0
"""A test gives up after so long. It is no performance limit, so it suffices on the busiest machine."""


def until(condition: Callable[[], T], what: str = "", seconds: float = PATIENCE_S, *, at_most_s: float = 0.5) -> T:
    """Return the result of `condition` as soon as it is true; fail with `what` in the message after so long.

    The interval grows to a tenth of the time waited, at most `at_most_s`: most conditions read files of the very
    processes waited for, and compete with them.
    """
    began = time.monotonic()
    while not (found := condition()):
        waited = time.monotonic() - began
        assert waited < seconds, f"{what or 'it'} did not come true within {seconds:g} s: {found!r}"
        time.sleep(min(max(0.005, waited / 10), at_most_s))
    return found
