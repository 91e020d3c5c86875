"""Define which incidents count as failures, and of what kind. No Django."""

from __future__ import annotations

from diagnosis.causes import CAUSES, NONE, UNKNOWN

NOT_FAILURES = frozenset({NONE, "scheduler.cancelled", "scheduler.preempted"})
MACHINES = tuple(code for code, cause in CAUSES.items() if cause.owner == "sysadmin")
"""Hardware, network, storage and scheduler causes, which affect any job."""
PROGRAMS = tuple(code for code, cause in CAUSES.items() if cause.owner == "researcher")
UNDIAGNOSED = ("", UNKNOWN)
KINDS = ("all", "machines", "programs")


def causes_of(kind: str) -> tuple[str, ...] | None:
    """Return the cause codes of this kind; None for all."""
    return {"machines": MACHINES, "programs": PROGRAMS}.get(kind)
