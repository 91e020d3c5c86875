"""Apply health rules to observations: the same for live data, for a rule's examples, and for a trial on the past.

Time is that of the evidence, not of the caller: a finding opens and clears at the moment at which its rule says so,
however often or late the engine is called. So a trial over thirty days finds what the live engine would have found.

    observe          an event, or one reading of a state
    advance          time passes: states have held for long enough, quiet findings clear
    advance_unread   time passes while nothing is read: a state counts until its last reading
    repair           a GPU was reset or a node booted
    remove           what the finding is about no longer exists
    clear            a person or a passed burn-in ends the finding
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from operator import attrgetter
from typing import Literal

from nodes.health.progress import MAX_OCCURRENCES_PER_TRIGGER, MAX_OPENINGS, Observation, Occurrence, RuleProgress
from nodes.health.rules.rule import Action, Rule, Severity, Trigger

GAP_S = 90.0
"""A state that was not read for longer is unknown: it does not hold, and it is not good."""

Repair = Literal["reset", "boot"]
_REPAIRS: dict[Repair, frozenset[str]] = {"reset": frozenset({"reset"}), "boot": frozenset({"reset", "boot"})}


def observe(rule: Rule, progress: RuleProgress, observation: Observation) -> None:
    """Note an observation. What happened before the finding was cleared does not count."""
    if progress.cleared_at is not None and observation.at <= progress.cleared_at:
        return
    advance(rule, progress, observation.at)
    for number, trigger in enumerate(rule.triggers):
        if trigger.signal.name != observation.signal:
            continue
        if trigger.signal.is_event:
            if trigger.matches(observation.signal, observation.fields):
                _count(rule, progress, number, observation)
        else:
            _hold(progress, number, trigger, observation)
            progress.read_at = observation.at
    _note_recovery(rule, progress, observation)
    advance(rule, progress, observation.at)
    if not progress.holding and progress.good_since is None:
        progress.read_at = None  # nothing depends on it


def advance(rule: Rule, progress: RuleProgress, now: float, read_until: float | None = None) -> None:
    """Let time pass until `now`: open what has held for long enough, clear what is over.

    States last until `read_until` only; None: until now.
    """
    read_until = now if read_until is None else min(now, read_until)
    if progress.state == "watching":
        _open_if_due(rule, progress, read_until)
    if progress.state == "watching":
        _forget_if_over(rule, progress, now)
    until = read_until if rule.clearing.ending == "recovered" else now
    if progress.state == "open" and (over := _over_at(rule, progress)) is not None and over <= until:
        clear(progress, over)


def advance_unread(rule: Rule, progress: RuleProgress, now: float) -> None:
    """Let time pass until `now` while nothing is read, since the agent is silent or the portal was stopped.

    A state counts until its last reading, so it opens and clears nothing by itself. After GAP_S it is unknown. An open
    finding stays open then: only a reading shows that it is over.
    """
    advance(rule, progress, now, progress.read_at)
    if not is_unread(progress, now):
        return
    progress.good_since = progress.read_at = None
    if progress.state == "watching":
        progress.holding = {}
        _forget_if_over(rule, progress, now)


def is_unread(progress: RuleProgress, now: float) -> bool:
    """Return whether what counts as holding or as good was last read so long ago that it is unknown."""
    return progress.read_at is not None and now - progress.read_at > GAP_S


def repair(rule: Rule, progress: RuleProgress, kind: Repair, at: float) -> None:
    """Note that the GPU was reset or the node booted; counts where the rule ends with that, and for what was before."""
    if progress.is_active and rule.clearing.ending in _REPAIRS[kind] and at > (progress.last_seen or at):
        progress.repaired_at = at


def remove(rule: Rule, progress: RuleProgress, at: float) -> None:
    """Note that what the finding is about no longer exists: no state of it holds, which is as good as recovered."""
    advance(rule, progress, at)
    progress.holding = {}
    if progress.state == "open" and rule.clearing.ending == "recovered":
        progress.good_since = at if progress.good_since is None else progress.good_since
        progress.read_at = at
    advance(rule, progress, at)


def clear(progress: RuleProgress, at: float) -> None:
    """End the finding. Nothing that happened until then opens it again."""
    progress.state, progress.cleared_at = "cleared", at
    progress.holding, progress.occurrences = {}, {}
    progress.good_since = progress.read_at = None


def next_change(rule: Rule, progress: RuleProgress) -> float | None:
    """Return when the finding will next open, clear or be forgotten by itself, as far as is known now."""
    if progress.state == "open":
        return _over_at(rule, progress)
    if progress.state != "watching":
        return None
    openings = [since + rule.triggers[number].for_s for number, since in progress.holding.items()]
    ends = [
        occurrences[-1].at + rule.triggers[number].within_s
        for number, occurrences in progress.occurrences.items()
        if occurrences
    ]
    return min(openings, default=None) if openings else max(ends, default=None)


def effective(rule: Rule, progress: RuleProgress) -> tuple[Severity, Action]:
    """Return severity and action: those of the escalation if the rule has opened too often."""
    escalation = rule.escalation
    if escalation is None or progress.opened_at is None:
        return rule.severity, rule.action
    since = progress.opened_at - escalation.within_s
    if sum(opening > since for opening in progress.openings) >= escalation.count:
        return escalation.severity, escalation.action
    return rule.severity, rule.action


def _count(rule: Rule, progress: RuleProgress, number: int, observation: Observation) -> None:
    trigger = rule.triggers[number]
    _record_evidence(progress, observation.at, observation.count)
    if progress.repaired_at is not None and observation.at > progress.repaired_at:
        progress.repaired_at = None  # the repair did not help
    if progress.state == "open":
        return
    values = {name: str(observation.fields.get(name) or "")[:200] for name in trigger.distinct}
    occurrences = progress.occurrences.setdefault(number, [])
    insort(occurrences, Occurrence(observation.at, observation.count, values), key=_at)
    del occurrences[: max(0, len(occurrences) - MAX_OCCURRENCES_PER_TRIGGER)]
    if (at := _reached_at(trigger, occurrences)) is not None:
        _open(progress, at)


def _reached_at(trigger: Trigger, occurrences: list[Occurrence]) -> float | None:
    """Return when the trigger's count was reached within its time; None if it never was.

    One pass, in which a window of that length moves along: a GPU may report a thousand Xids that belong to no job, and
    each of them asks again.
    """
    if any(len(_different(occurrences, name)) < least for name, least in trigger.distinct.items()):
        return None
    first = total = 0
    values: dict[str, Counter[str]] = {name: Counter() for name in trigger.distinct}
    for occurrence in occurrences:
        total += occurrence.count
        _add(values, occurrence, 1)
        while occurrence.at - occurrences[first].at > trigger.within_s:
            total -= occurrences[first].count
            _add(values, occurrences[first], -1)
            first += 1
        if total >= trigger.count and all(
            len(values[name].keys() - {""}) >= least for name, least in trigger.distinct.items()
        ):
            return occurrence.at
    return None


def _different(occurrences: list[Occurrence], name: str) -> set[str]:
    return {occurrence.values.get(name, "") for occurrence in occurrences} - {""}


def _add(values: dict[str, Counter[str]], occurrence: Occurrence, number: int) -> None:
    """Count the values of an occurrence; one from before its rule asked for a field has none of it."""
    for name, counter in values.items():
        value = occurrence.values.get(name, "")
        counter[value] += number
        if not counter[value]:
            del counter[value]


def _hold(progress: RuleProgress, number: int, trigger: Trigger, observation: Observation) -> None:
    if trigger.matches(observation.signal, observation.fields):
        progress.holding.setdefault(number, observation.at)
        _record_evidence(progress, observation.at, 0 if progress.count else 1)
        if progress.repaired_at is not None and observation.at > progress.repaired_at:
            progress.repaired_at = None
    else:
        progress.holding.pop(number, None)


def _record_evidence(progress: RuleProgress, at: float, count: int) -> None:
    if not progress.is_active:
        progress.state, progress.first_seen, progress.last_seen, progress.count = "watching", at, at, 0
        progress.opened_at = progress.repaired_at = progress.good_since = progress.read_at = None
    progress.first_seen = at if progress.first_seen is None else min(progress.first_seen, at)
    progress.last_seen = at if progress.last_seen is None else max(progress.last_seen, at)
    progress.count += count


def _note_recovery(rule: Rule, progress: RuleProgress, observation: Observation) -> None:
    """Note since when the state is good again. An unknown value is no recovery."""
    triggers = [trigger for trigger in rule.triggers if trigger.signal.name == observation.signal]
    if progress.state != "open" or rule.clearing.ending != "recovered" or not triggers:
        return
    fields = observation.fields
    if rule.clearing.where and observation.signal != rule.triggers[0].signal.name:
        # `where` is about the first trigger's signal. A reading of another one only shows that its state holds again.
        if progress.holding:
            progress.good_since = None
        return
    if rule.clearing.where:
        is_good = all(condition.holds(fields.get(name)) for name, condition in rule.clearing.where.items())
    else:
        is_good = all(fields.get(name) is not None for trigger in triggers for name in trigger.where)
    if progress.holding or not is_good:
        progress.good_since = None
    elif progress.good_since is None:
        progress.good_since = observation.at


def _open_if_due(rule: Rule, progress: RuleProgress, now: float) -> None:
    due = [since + rule.triggers[number].for_s for number, since in progress.holding.items()]
    if due and min(due) <= now:
        _open(progress, min(due))


def _open(progress: RuleProgress, at: float) -> None:
    progress.state, progress.opened_at = "open", at
    progress.occurrences = {}
    progress.openings = [*progress.openings, at][-MAX_OPENINGS:]


def _forget_if_over(rule: Rule, progress: RuleProgress, now: float) -> None:
    """Stop watching once nothing holds and no event counts any more."""
    for number in list(progress.occurrences):
        since = now - rule.triggers[number].within_s
        recent = [occurrence for occurrence in progress.occurrences[number] if occurrence.at >= since]
        if recent:
            progress.occurrences[number] = recent
        else:
            del progress.occurrences[number]
    if not progress.occurrences and not progress.holding:
        progress.state, progress.first_seen, progress.last_seen, progress.count = "none", None, None, 0


def _over_at(rule: Rule, progress: RuleProgress) -> float | None:
    """Return when an open finding is over, as far as is known now; None: not by itself."""
    clearing = rule.clearing
    if rule.needs_burn_in or progress.holding or progress.last_seen is None:
        return None
    if clearing.ending == "quiet":
        return progress.last_seen + clearing.after_s
    since = progress.good_since if clearing.ending == "recovered" else progress.repaired_at
    return None if since is None else since + clearing.after_s


_at = attrgetter("at")
