"""Waiting for what a test has set going: for a fact, never for a time that might be enough."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
PATIENCE_S = 120.0
"""After so long a test gives up: nobody's bar, so it is long enough for the busiest machine."""


def until(look: Callable[[], T], seconds: float = PATIENCE_S, at_most_s: float = 0.1) -> T:
    """What `look` answers, as soon as that is true; fails after so long.

    Looks ever less often, a tenth of what it has waited apart and `at_most_s`: most looks read files of the very
    processes waited for.
    """
    began = time.monotonic()
    while not (found := look()):
        waited = time.monotonic() - began
        assert waited < seconds, f"not within {seconds:g} s: {found!r}"
        time.sleep(min(max(0.005, waited / 10), at_most_s))
    return found
