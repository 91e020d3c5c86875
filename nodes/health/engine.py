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

from nodes.health.progress import MOST_OCCURRENCES, MOST_OPENINGS, Observation, Occurrence, RuleProgress
from nodes.health.rules.rule import Action, Rule, Severity, Trigger

GAP_S = 90.0
"""A state that was not read for longer is unknown: it does not hold, and it is not good."""

Repair = Literal["reset", "boot"]
_REPAIRS: dict[Repair, frozenset[str]] = {"reset": frozenset({"reset"}), "boot": frozenset({"reset", "boot"})}


def observe(rule: Rule, finding: RuleProgress, observation: Observation) -> None:
    """Note an observation. What happened before the finding was cleared does not count."""
    if finding.cleared_at is not None and observation.at <= finding.cleared_at:
        return
    advance(rule, finding, observation.at)
    for number, trigger in enumerate(rule.triggers):
        if trigger.signal.name != observation.signal:
            continue
        if trigger.signal.is_event:
            if trigger.matches(observation.signal, observation.fields):
                _count(rule, finding, number, observation)
        else:
            _hold(finding, number, trigger, observation)
            finding.read_at = observation.at
    _note_recovery(rule, finding, observation)
    advance(rule, finding, observation.at)
    if not finding.holding and finding.good_since is None:
        finding.read_at = None  # nothing depends on it


def advance(rule: Rule, finding: RuleProgress, now: float, read_until: float | None = None) -> None:
    """Let time pass until `now`: open what has held for long enough, clear what is over.

    States last until `read_until` only; None: until now.
    """
    read_until = now if read_until is None else min(now, read_until)
    if finding.state == "watching":
        _open_if_due(rule, finding, read_until)
    if finding.state == "watching":
        _forget_if_over(rule, finding, now)
    until = read_until if rule.clearing.ending == "recovered" else now
    if finding.state == "open" and (over := _over_at(rule, finding)) is not None and over <= until:
        clear(finding, over)


def advance_unread(rule: Rule, finding: RuleProgress, now: float) -> None:
    """Let time pass until `now` while nothing is read, since the agent is silent or the portal was stopped.

    A state counts until its last reading, so it opens and clears nothing by itself. After GAP_S it is unknown. An open
    finding stays open then: only a reading shows that it is over.
    """
    advance(rule, finding, now, finding.read_at)
    if not is_unread(finding, now):
        return
    finding.good_since = finding.read_at = None
    if finding.state == "watching":
        finding.holding = {}
        _forget_if_over(rule, finding, now)


def is_unread(finding: RuleProgress, now: float) -> bool:
    """Return whether what counts as holding or as good was last read so long ago that it is unknown."""
    return finding.read_at is not None and now - finding.read_at > GAP_S


def repair(rule: Rule, finding: RuleProgress, kind: Repair, at: float) -> None:
    """Note that the GPU was reset or the node booted; counts where the rule ends with that, and for what was before."""
    if finding.is_active and rule.clearing.ending in _REPAIRS[kind] and at > (finding.last_seen or at):
        finding.repaired_at = at


def remove(rule: Rule, finding: RuleProgress, at: float) -> None:
    """Note that what the finding is about no longer exists: no state of it holds, which is as good as recovered."""
    advance(rule, finding, at)
    finding.holding = {}
    if finding.state == "open" and rule.clearing.ending == "recovered":
        finding.good_since = at if finding.good_since is None else finding.good_since
        finding.read_at = at
    advance(rule, finding, at)


def clear(finding: RuleProgress, at: float) -> None:
    """End the finding. Nothing that happened until then opens it again."""
    finding.state, finding.cleared_at = "cleared", at
    finding.holding, finding.occurrences = {}, {}
    finding.good_since = finding.read_at = None


def next_change(rule: Rule, finding: RuleProgress) -> float | None:
    """Return when the finding will next open, clear or be forgotten by itself, as far as is known now."""
    if finding.state == "open":
        return _over_at(rule, finding)
    if finding.state != "watching":
        return None
    openings = [since + rule.triggers[number].for_s for number, since in finding.holding.items()]
    ends = [
        occurrences[-1].at + rule.triggers[number].within_s
        for number, occurrences in finding.occurrences.items()
        if occurrences
    ]
    return min(openings, default=None) if openings else max(ends, default=None)


def effective(rule: Rule, finding: RuleProgress) -> tuple[Severity, Action]:
    """Return severity and action: those of the escalation if the rule has opened too often."""
    escalation = rule.escalation
    if escalation is None or finding.opened_at is None:
        return rule.severity, rule.action
    since = finding.opened_at - escalation.within_s
    if sum(opening > since for opening in finding.openings) >= escalation.count:
        return escalation.severity, escalation.action
    return rule.severity, rule.action


def _count(rule: Rule, finding: RuleProgress, number: int, observation: Observation) -> None:
    trigger = rule.triggers[number]
    _record_evidence(finding, observation.at, observation.count)
    if finding.repaired_at is not None and observation.at > finding.repaired_at:
        finding.repaired_at = None  # the repair did not help
    if finding.state == "open":
        return
    values = {name: str(observation.fields.get(name) or "")[:200] for name in trigger.distinct}
    occurrences = finding.occurrences.setdefault(number, [])
    insort(occurrences, Occurrence(observation.at, observation.count, values), key=_at)
    del occurrences[: max(0, len(occurrences) - MOST_OCCURRENCES)]
    if (at := _reached_at(trigger, occurrences)) is not None:
        _open(finding, at)


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


def _hold(finding: RuleProgress, number: int, trigger: Trigger, observation: Observation) -> None:
    if trigger.matches(observation.signal, observation.fields):
        finding.holding.setdefault(number, observation.at)
        _record_evidence(finding, observation.at, 0 if finding.count else 1)
        if finding.repaired_at is not None and observation.at > finding.repaired_at:
            finding.repaired_at = None
    else:
        finding.holding.pop(number, None)


def _record_evidence(finding: RuleProgress, at: float, count: int) -> None:
    if not finding.is_active:
        finding.state, finding.first_seen, finding.last_seen, finding.count = "watching", at, at, 0
        finding.opened_at = finding.repaired_at = finding.good_since = finding.read_at = None
    finding.first_seen = at if finding.first_seen is None else min(finding.first_seen, at)
    finding.last_seen = at if finding.last_seen is None else max(finding.last_seen, at)
    finding.count += count


def _note_recovery(rule: Rule, finding: RuleProgress, observation: Observation) -> None:
    """Note since when the state is good again. An unknown value is no recovery."""
    triggers = [trigger for trigger in rule.triggers if trigger.signal.name == observation.signal]
    if finding.state != "open" or rule.clearing.ending != "recovered" or not triggers:
        return
    fields = observation.fields
    if rule.clearing.where and observation.signal != rule.triggers[0].signal.name:
        # `where` is about the first trigger's signal. A reading of another one only shows that its state holds again.
        if finding.holding:
            finding.good_since = None
        return
    if rule.clearing.where:
        is_good = all(condition.holds(fields.get(name)) for name, condition in rule.clearing.where.items())
    else:
        is_good = all(fields.get(name) is not None for trigger in triggers for name in trigger.where)
    if finding.holding or not is_good:
        finding.good_since = None
    elif finding.good_since is None:
        finding.good_since = observation.at


def _open_if_due(rule: Rule, finding: RuleProgress, now: float) -> None:
    due = [since + rule.triggers[number].for_s for number, since in finding.holding.items()]
    if due and min(due) <= now:
        _open(finding, min(due))


def _open(finding: RuleProgress, at: float) -> None:
    finding.state, finding.opened_at = "open", at
    finding.occurrences = {}
    finding.openings = [*finding.openings, at][-MOST_OPENINGS:]


def _forget_if_over(rule: Rule, finding: RuleProgress, now: float) -> None:
    """Stop watching once nothing holds and no event counts any more."""
    for number in list(finding.occurrences):
        since = now - rule.triggers[number].within_s
        recent = [occurrence for occurrence in finding.occurrences[number] if occurrence.at >= since]
        if recent:
            finding.occurrences[number] = recent
        else:
            del finding.occurrences[number]
    if not finding.occurrences and not finding.holding:
        finding.state, finding.first_seen, finding.last_seen, finding.count = "none", None, None, 0


def _over_at(rule: Rule, finding: RuleProgress) -> float | None:
    """Return when an open finding is over, as far as is known now; None: not by itself."""
    clearing = rule.clearing
    if rule.needs_burn_in or finding.holding or finding.last_seen is None:
        return None
    if clearing.ending == "quiet":
        return finding.last_seen + clearing.after_s
    since = finding.good_since if clearing.ending == "recovered" else finding.repaired_at
    return None if since is None else since + clearing.after_s


_at = attrgetter("at")
