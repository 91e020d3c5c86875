"""Define the criteria of a job search, as people give them: filters by name, and an order."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

from jobs.models import Attempt

# Names for several states at once.
STATE_GROUPS: dict[str, frozenset[str]] = {
    "alive": Attempt.ALIVE,
    "bad": Attempt.ENDED_BADLY,
    "ended": frozenset(Attempt.State.values) - Attempt.ALIVE,
}
STATE_WORDS = [*Attempt.State.values, *STATE_GROUPS]
DEFAULT_SORT = "-created"


@dataclass(frozen=True, kw_only=True)
class JobCriteria:
    """The filters and the order of a job search.

    Each word of `text` must be in the name, or be a job's number, a tag, a project or a person.
    """

    text: str = ""
    states: list[str] = field(default_factory=list)  # states and words of STATE_GROUPS; any of them
    projects: list[str] = field(default_factory=list)
    owner: str = ""
    kind: str = ""
    tags: list[str] = field(default_factory=list)  # all of them
    created_after: datetime | None = None
    created_before: datetime | None = None
    parent: int | None = None
    sweep: int | None = None
    sort: str = DEFAULT_SORT

    def expanded_states(self) -> list[str]:
        """Return the requested states, with groups expanded."""
        wanted: set[str] = set()
        for state in self.states:
            wanted |= STATE_GROUPS.get(state, frozenset({state}))
        return sorted(wanted)
