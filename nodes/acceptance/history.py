"""Remember which clauses failed for a while during the tests, though all is well again at their end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from nodes.acceptance.clauses import FAILED, ClauseOutcome
from vigil_core import formatting

LASTING_S = 300.0
"""A failure of less is forgotten: an agent restarts, or the portal has not heard from it yet after its own outage."""
UNOBSERVED_S = 120.0
"""After so long without an observation, nothing is known about the time between."""
DURING_TESTS = frozenset({"agents", "gpus", "nvlinks", "ecc", "mounts", "clock"})
"""Clauses that must hold for the whole of the tests. PCIe and heat are remembered by GPU (nodes.acceptance.facts).

The others are about what somebody sets up, and may correct while the tests run.
"""
MAX_DETAILS = 5


@dataclass(frozen=True)
class ClauseHistory:
    """Remembers the longest failure of one clause during the tests; times are Unix seconds."""

    since: float | None = None
    """When the present failure began; None if the clause holds."""
    began_at: float = 0.0
    """When the longest failure began; `seconds` and `details` describe that failure."""
    seconds: float = 0.0
    details: Sequence[str] = ()

    def observed(self, outcome: ClauseOutcome, now: float, previous: float) -> ClauseHistory:
        """Return the history with one more observation; `previous`: when the last one was made."""
        if outcome.outcome != FAILED:
            return replace(self, since=None)
        since = now if self.since is None or now - previous > UNOBSERVED_S else self.since
        if now - since < max(LASTING_S, self.seconds):
            return replace(self, since=since)
        return ClauseHistory(since, since, now - since, (outcome.details or (outcome.measured,))[:MAX_DETAILS])

    def applied(self, outcome: ClauseOutcome) -> ClauseOutcome:
        """Return a failed outcome if the clause failed for long, and does not now."""
        if not self.seconds or outcome.outcome == FAILED:
            return outcome
        began = formatting.exact(datetime.fromtimestamp(self.began_at, UTC))
        text = f"It failed during the tests, for {formatting.duration(self.seconds)} from {began}:"
        return replace(outcome, outcome=FAILED, details=(text, *self.details, *outcome.details))


def read_histories(rows: Sequence[Mapping[str, Any]]) -> dict[str, ClauseHistory]:
    """Return the histories by clause from what is stored of the clauses."""
    stored = {row["key"]: row.get("history", {}) for row in rows}
    return {key: ClauseHistory(**stored.get(key, {})) for key in DURING_TESTS}
