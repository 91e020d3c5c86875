"""Merge observations into the evidence of an entry, which its page lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nodes.health.rules.signal import SIGNALS

MAX_EVIDENCE = 20


def merged(stored: Sequence[Any], new: Sequence[Any]) -> list[Any]:
    """Append observations; a state that lasts is one observation with its newest values."""
    found = list(stored)
    for observation in new:
        if found and _is_state(observation) and found[-1][1] == observation[1]:
            found[-1] = [found[-1][0], *observation[1:]]
        else:
            found.append(observation)
    return found[-MAX_EVIDENCE:]


def is_planted(evidence: Sequence[Any]) -> bool:
    """Return whether a game day planted all of this."""
    return bool(evidence) and all(fields.get("planted") for _, _, fields, _ in evidence)


def _is_state(observation: Sequence[Any]) -> bool:
    signal = SIGNALS.get(observation[1])
    return signal is None or not signal.is_event
