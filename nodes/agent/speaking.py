"""The agent's log: a line on stderr a transition. Who starts it keeps the lines (systemd, an engine)."""

from __future__ import annotations

import sys
import time
from contextlib import suppress

from nodes.agent.cleaning import clean

MOST_LETTERS = 1_000


def say(sentence: str) -> None:
    """Write a line; a log that cannot be written ends nothing."""
    moment = time.strftime("%Y-%m-%d %H:%M:%S")
    with suppress(OSError, ValueError):
        print(f"{moment} {clean(sentence, MOST_LETTERS)}", file=sys.stderr, flush=True)


class Told:
    """Sentences by subject, each said when it is another than the last."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    def say(self, subject: str, sentence: str) -> None:
        """ "" is said to nobody, but makes the next one news."""
        if self._last.get(subject, "") != sentence:
            self._last[subject] = sentence
            if sentence:
                say(sentence)
