"""Waiting for what a test has set going: for a fact, never for a time that might be enough."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(look: Callable[[], T], seconds: float = 120.0) -> T:
    """What `look` answers, as soon as that is true; fails after so long."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {found!r}"
        time.sleep(0.005)
    return found
