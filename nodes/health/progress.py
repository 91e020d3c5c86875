"""Hold the state of one rule about one GPU, node or rack, which the engine changes. No Django."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

from nodes.health.rules.condition import FieldValue

State = Literal["none", "watching", "open", "cleared"]

MAX_OCCURRENCES_PER_TRIGGER = 1_000
"""Older ones are dropped. A rule needs at most as many (`rule.MAX_COUNT`)."""
MAX_OPENINGS = 50


class UnreadableProgress(ValueError):
    """Raised for a stored state of another format; the message says what is wrong."""


class Subject(NamedTuple):
    """Identifies what a finding is about. `gpu`: a UUID, or "". `item`: a mount or port of the node, or ""."""

    node: str
    gpu: str = ""
    item: str = ""


@dataclass(frozen=True, slots=True)
class Observation:
    """Records what was observed about a subject at a moment (Unix seconds). `count`: so many equal events at once."""

    signal: str
    subject: Subject
    at: float
    fields: Mapping[str, FieldValue]
    count: int = 1


@dataclass(slots=True)
class Occurrence:
    """An event that counts towards a trigger, with the values that must differ between events."""

    at: float
    count: int
    values: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class RuleProgress:
    """The progress of one rule about one subject.

    none → watching (something was observed) → open (the rule's count or time is reached) → cleared. `holding` and
    `occurrences` are by the position of the rule's trigger. `read_at`: when a state was last read that holds or is
    good. After it was cleared only newer evidence counts.
    """

    state: State = "none"
    first_seen: float | None = None
    last_seen: float | None = None
    count: int = 0
    occurrences: dict[int, list[Occurrence]] = field(default_factory=dict)
    holding: dict[int, float] = field(default_factory=dict)
    good_since: float | None = None
    read_at: float | None = None
    repaired_at: float | None = None
    opened_at: float | None = None
    cleared_at: float | None = None
    openings: list[float] = field(default_factory=list)

    @property
    def is_active(self) -> bool:
        return self.state in ("watching", "open")

    def as_payload(self) -> dict[str, Any]:
        """Return the progress as JSON values."""
        values = {name: getattr(self, name) for name in _PLAIN if getattr(self, name) is not None}
        values["occurrences"] = [
            [number, occurrence.at, occurrence.count, occurrence.values]
            for number, occurrences in self.occurrences.items()
            for occurrence in occurrences
        ]
        return {**values, "holding": [[number, since] for number, since in self.holding.items()]}

    @classmethod
    def from_payload(cls, payload: Mapping[str, Any]) -> RuleProgress:
        """Return the progress of `as_payload`. Raises UnreadableProgress for anything else."""
        try:
            progress = cls(**{name: payload[name] for name in _PLAIN if name in payload})
            for number, at, count, values in payload.get("occurrences", ()):
                progress.occurrences.setdefault(number, []).append(Occurrence(at, count, values))
            progress.holding = dict(payload.get("holding", ()))
        except (AttributeError, TypeError, ValueError) as error:
            raise UnreadableProgress(str(error)) from None
        if not progress._is_readable():
            raise UnreadableProgress("a value has another type than expected")
        progress._add_reading()
        return progress

    def _add_reading(self) -> None:
        """Add when states were last read, if the entry was stored before that was noted: not before its last change."""
        if self.read_at is None and (self.good_since is not None or (self.holding and self.state == "watching")):
            self.read_at = max(self.good_since or 0.0, self.last_seen or 0.0)

    def _is_readable(self) -> bool:
        occurrences = [item for items in self.occurrences.values() for item in items]
        moments = [getattr(self, name) for name in _MOMENTS if getattr(self, name) is not None]
        moments += [item.at for item in occurrences] + list(self.holding.values())
        return (
            self.state in get_args(State)
            and isinstance(self.openings, list)
            and all(isinstance(moment, int | float) for moment in (*moments, *self.openings))
            and all(type(number) is int and number >= 0 for number in (*self.occurrences, *self.holding))
            and all(type(count) is int for count in (self.count, *(item.count for item in occurrences)))
            and all(isinstance(item.values, dict) for item in occurrences)
        )

    def successor(self) -> RuleProgress:
        """Return the progress that follows when something new happens after this one was cleared."""
        return RuleProgress(cleared_at=self.cleared_at, openings=self.openings[-MAX_OPENINGS:])


_MOMENTS = ("first_seen", "last_seen", "good_since", "read_at", "repaired_at", "opened_at", "cleared_at")
_PLAIN = ("state", "count", "openings", *_MOMENTS)
