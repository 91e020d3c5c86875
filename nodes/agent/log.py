"""Log to stderr, one line per change of state; systemd or a container engine collects it."""

from __future__ import annotations

import sys
import time
from contextlib import suppress

from nodes.agent.cleaning import clean

MAX_CHARACTERS = 1_000


def log(sentence: str) -> None:
    """Write a line; a log that cannot be written is ignored."""
    timestamp = time.strftime("%Y-%m-%d %H:%M:%S")
    with suppress(OSError, ValueError):
        print(f"{timestamp} {clean(sentence, MAX_CHARACTERS)}", file=sys.stderr, flush=True)


class StatusLog:
    """The current status per subject; only changes are logged."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    def update(self, subject: str, status: str) -> None:
        """Log the status if it differs from the last one. "" logs nothing, but makes the next one a change."""
        if self._last.get(subject, "") != status:
            self._last[subject] = status
            if status:
                log(status)
