"""Describe planned maintenance as far as jobs are concerned. Pure; times are Unix seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PlannedMaintenance:
    """A maintenance window that is planned or has begun.

    With `is_reserved` the scheduler reserves its nodes, as `reservation` once it has done so, and starts no job that
    would overlap. Else Vigil drains them at the start, in the name of `requester`: jobs may start until then.
    """

    reason: str
    nodes: frozenset[str]
    starts_at: float
    ends_at: float
    is_reserved: bool = False
    reservation: str = ""
    requester: str = ""

    def is_active(self, now: float) -> bool:
        return self.starts_at <= now < self.ends_at

    def has_drained(self, reason: str) -> bool:
        """Return whether a node's reason in the scheduler is this window's."""
        return bool(self.requester) and f"(vigil: {self.requester})" in reason
