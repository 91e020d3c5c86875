"""Apply a rule to the stored observations of one subject: the engine of live evaluation, without a database."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from nodes.health import engine
from nodes.health.engine import Repair
from nodes.health.progress import Observation, RuleProgress, Subject
from nodes.health.rules.rule import Action, Rule, Severity


class RepairStep(NamedTuple):
    """A GPU was reset, or the node booted, at this moment (Unix seconds)."""

    at: float
    kind: Repair


Step = Observation | RepairStep


@dataclass(frozen=True)
class ReplayedEntry:
    """A finding that would have opened. `cleared_at` is None if it would still be open at the end of the history."""

    subject: Subject
    opened_at: float
    cleared_at: float | None
    severity: Severity
    action: Action
    count: int
    observed: Observation | None


def replay(rule: Rule, subject: Subject, steps: Iterable[Step], until: float) -> Iterator[ReplayedEntry]:
    """Yield the findings that open on these steps, which are in order of time, up to `until` (Unix seconds).

    A finding that only a person or a burn-in ends stays open until `until`: what a person would have done is unknown.
    """
    history = SubjectHistory(rule, subject)
    for step in steps:
        yield from history.follow(step)
    yield from history.end(until)


class SubjectHistory:
    """The finding while time passes, with what made it open."""

    def __init__(self, rule: Rule, subject: Subject) -> None:
        self.rule, self.subject = rule, subject
        self.progress = RuleProgress()
        self.newest: Observation | None = None
        self.opening: tuple[Severity, Action, Observation | None] | None = None

    def follow(self, step: Step) -> Iterator[ReplayedEntry]:
        """Let time pass until the step, and take it; yield the finding that was over by then."""
        yield from self._advance(step.at)
        if isinstance(step, RepairStep):
            engine.repair(self.rule, self.progress, step.kind, step.at)
        else:
            self._observe(step)

    def end(self, until: float) -> Iterator[ReplayedEntry]:
        """Let time pass until the end; yield a finding that was over by then, and one that is still open."""
        yield from self._advance(until)
        if self.progress.state == "open":
            yield self._entry(None)

    def _advance(self, now: float) -> Iterator[ReplayedEntry]:
        engine.advance(self.rule, self.progress, now)
        self._note_opening()
        if self.progress.state == "cleared":
            yield self._entry(self.progress.cleared_at)
            self.progress, self.opening = self.progress.successor(), None

    def _observe(self, observation: Observation) -> None:
        if any(trigger.matches(observation.signal, observation.fields) for trigger in self.rule.triggers):
            self.newest = observation
        engine.observe(self.rule, self.progress, observation)
        self._note_opening()

    def _note_opening(self) -> None:
        if self.opening is None and self.progress.opened_at is not None:
            self.opening = (*engine.effective(self.rule, self.progress), self.newest)

    def _entry(self, cleared_at: float | None) -> ReplayedEntry:
        assert self.opening is not None
        severity, action, observed = self.opening
        opened_at = self.progress.opened_at or 0.0
        return ReplayedEntry(self.subject, opened_at, cleared_at, severity, action, self.progress.count, observed)
