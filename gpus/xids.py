"""Rank NVIDIA's Xids by what they mean for the next job on the GPU.

Source: NVIDIA's Xid catalogue, by its immediate action: replace or reboot is fatal, reset is critical, investigate is a
warning, restart the application is a note.
"""

from __future__ import annotations

from enum import IntEnum


class Severity(IntEnum):
    """Urgency of an error, ordered: the worst of several errors is their `max`."""

    NOTE = 0
    """An error of the program itself, or one that ends only the program."""
    WARNING = 1
    CRITICAL = 2
    """The GPU needs a reset before the next job."""
    FATAL = 3
    """The GPU or its node needs a reboot or a repair."""


FATAL_XIDS = frozenset({48, 54, 61, 62, 64, 79, 95, 140, 143, 157, 161, 171, 172})
CRITICAL_XIDS = frozenset({46, 74, 109, 110, 119, 120, 136, 151, 154, 155, 158, 167})
NOTE_XIDS = frozenset({13, 31, 43, 45, 94, 156, 160})


def severity(code: int | None) -> Severity:
    """Return the severity of this Xid; an unlisted one is a warning, because drivers add new ones."""
    if code in FATAL_XIDS:
        return Severity.FATAL
    if code in CRITICAL_XIDS:
        return Severity.CRITICAL
    return Severity.NOTE if code in NOTE_XIDS else Severity.WARNING
