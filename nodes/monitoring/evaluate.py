"""Apply the health rules to what was observed, and store what they find.

States are read outside of any transaction; only entries that a rule matches, or that exist already, are then locked and
written. Evaluating the same observations twice changes nothing, so two workers may do it at once.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, NamedTuple

from django.db import transaction
from django.db.models import Max, QuerySet
from django.utils import timezone

from nodes.health import engine
from nodes.health.progress import Observation, RuleProgress, Subject
from nodes.health.rules.rule import ACTIONS, Rule
from nodes.models import Gpu, HealthControl, HealthEntry, NodeEvent
from nodes.monitoring import events, evidence, policies
from nodes.monitoring.matching import RuleMatcher
from nodes.monitoring.removed import RemovedParts
from nodes.monitoring.rule_progress import progress_of
from nodes.monitoring.site_rules import rules_in_force, unreadable_rules
from nodes.monitoring.states import States
from portal import bulk

LATE = timedelta(minutes=10)
"""Evidence that is older when it arrives is history: it is proposed, never acted on."""
MAX_DETAIL = 200
MAX_ENTRIES = 120
"""Subjects and entries per transaction: SQLite has one writer, and others wait for it."""
EVENTS_S = 5.0
"""For new events, per evaluation."""
AT_ONCE_S = 0.5
"""For events that are judged as they arrive, by the worker that follows jobs."""
REFRESH_S = 60.0
"""How old the stored `last_seen` of a lasting state may become."""
REREAD_S = 30.0
"""How old the stored `read_at` may become: with the next evaluation less than `engine.GAP_S`."""
MAX_ITEMS = 64
"""Active entries of one rule about mounts or ports of one node: whatever its agent reports."""
MAX_TITLE = 120
PLANTED = " (injected by a game day)"
State = HealthEntry.EntryState


class EntryKey(NamedTuple):
    """What an active entry is about: one rule and one subject."""

    rule: str
    subject: Subject


@dataclass
class EvaluationOutcome:
    """The entries that one evaluation opened."""

    opened: list[HealthEntry] = field(default_factory=list)


def evaluate(now: datetime | None = None) -> EvaluationOutcome:
    """Judge new events and the current states; return the entries that opened."""
    now = now or timezone.now()
    rules = rules_in_force()
    evaluation = EvaluationOutcome()
    until = time.monotonic() + EVENTS_S
    while _judge_events(rules, now, evaluation) and time.monotonic() < until:
        pass  # in a storm the next evaluation judges the rest
    _judge_states(rules, States.read(now), evaluation)
    _advance(rules, now, evaluation)
    return evaluation


def evaluate_events(now: datetime | None = None) -> EvaluationOutcome:
    """Judge new events only, for half a second at most: what is left waits for `evaluate`."""
    now = now or timezone.now()
    rules = rules_in_force()
    evaluation = EvaluationOutcome()
    until = time.monotonic() + AT_ONCE_S
    while _judge_events(rules, now, evaluation) and time.monotonic() < until:
        pass
    return evaluation


def _judge_events(rules: Mapping[str, Rule], now: datetime, evaluation: EvaluationOutcome) -> int:
    """Judge a batch of events in one transaction; return how many rows there were."""
    if not NodeEvent.objects.filter(events.UNJUDGED).exists():
        return 0
    began = time.monotonic()
    with transaction.atomic():
        HealthControl.locked()
        judgements = events.unjudged(rules.values())
        changes = _EntryChanges(rules, now, evaluation)
        changes.load(_keys_of_events(rules, judgements), nodes={j.row.agent.node for j in judgements if j.repair})
        for judgement in judgements:
            if judgement.observation is not None:
                changes.observe(judgement.observation)
            elif judgement.repair is not None:
                changes.repair(judgement.row.agent.node, judgement.repair, judgement.row.last_at.timestamp())
            judgement.row.judged = judgement.row.count
        changes.save()
        bulk.update_rows([judgement.row for judgement in judgements], ("judged",))
    bulk.give_way(began)
    return len(judgements)


def _keys_of_events(rules: Mapping[str, Rule], judgements: Iterable[events.Judgement]) -> set[EntryKey]:
    observations = [judgement.observation for judgement in judgements if judgement.observation is not None]
    matcher = RuleMatcher(rules)
    return {EntryKey(rule.name, o.subject) for o in observations for rule in matcher.matching(o)}


def _judge_states(rules: Mapping[str, Rule], states: States, evaluation: EvaluationOutcome) -> None:
    active, matcher = _active_rules(), RuleMatcher(rules)
    concerned: defaultdict[Subject, list[Observation]] = defaultdict(list)
    keys: dict[Subject, set[EntryKey]] = defaultdict(set)
    for observation in states.observations():
        subject = observation.subject
        for rule in matcher.matching(observation):
            keys[subject].add(EntryKey(rule.name, subject))
        if names := active.get(subject):
            signal_rules = matcher.by_signal.get(observation.signal, ())
            keys[subject].update(EntryKey(rule.name, subject) for rule in signal_rules if rule.name in names)
        if keys.get(subject):
            concerned[subject].append(observation)
    removed = RemovedParts(states).among(active)
    for subject in removed:
        keys[subject].update(EntryKey(name, subject) for name in active[subject])
    for subjects in _batches(list(keys)):
        began = time.monotonic()
        with transaction.atomic():
            HealthControl.locked()
            changes = _EntryChanges(rules, states.now, evaluation)
            changes.load({key for subject in subjects for key in keys[subject]})
            for subject in subjects:
                for observation in concerned[subject]:
                    changes.observe(observation, only=keys[subject])
                if subject in removed:
                    changes.remove(keys[subject])
            changes.save()
        bulk.give_way(began)


def _advance(rules: Mapping[str, Rule], now: datetime, evaluation: EvaluationOutcome) -> None:
    """Open, clear and forget what is due by now."""
    due = list(HealthEntry.objects.due(now).order_by("due_at").values_list("pk", flat=True))
    due += _of_ended_rules(rules)
    for start in range(0, len(due), MAX_ENTRIES):
        began = time.monotonic()
        with transaction.atomic():
            HealthControl.locked()
            changes = _EntryChanges(rules, now, evaluation)
            rows = HealthEntry.objects.active().select_related("gpu")
            changes.take(rows.filter(pk__in=due[start : start + MAX_ENTRIES]))
            changes.save()
        bulk.give_way(began)


def _of_ended_rules(rules: Mapping[str, Rule]) -> list[int]:
    """Return the active entries of rules that were switched off or deleted."""
    rows = HealthEntry.objects.active().exclude(rule__in=list(rules))
    names = set(rows.order_by().values_list("rule", flat=True).distinct())
    ended = names - unreadable_rules() if names else set()
    return list(rows.filter(rule__in=ended).values_list("pk", flat=True)) if ended else []


class _EntryChanges:
    """The entries that an evaluation may change, while the control row is locked."""

    def __init__(self, rules: Mapping[str, Rule], now: datetime, evaluation: EvaluationOutcome) -> None:
        self.rules = rules
        self.now = now
        self.evaluation = evaluation
        self.rows: dict[EntryKey, HealthEntry] = {}
        self.over: list[HealthEntry] = []
        self.progress: dict[EntryKey, RuleProgress] = {}
        self.late: set[EntryKey] = set()
        self.evidence: defaultdict[EntryKey, list[Any]] = defaultdict(list)
        self._by_signal = RuleMatcher(rules).by_signal

    @cached_property
    def modes(self) -> Mapping[str, str]:
        """Return the policies of actions by action."""
        return policies.modes()

    @cached_property
    def unreadable(self) -> frozenset[str]:
        """Return the rules that cannot be read: nobody ended their findings."""
        return unreadable_rules()

    def load(self, keys: set[EntryKey], nodes: Iterable[str] = ()) -> None:
        """Load the active entries of these keys, all active ones of these nodes, and what was cleared last."""
        rows = HealthEntry.objects.active().select_related("gpu").order_by()
        # Two queries: an index leads to the rows of each, but not to those of one or the other.
        self.take(rows.filter(node__in={key.subject.node for key in keys}, rule__in={key.rule for key in keys}))
        if repaired := set(nodes):
            self.take(rows.filter(node__in=repaired))
        missing = self._within_limit(keys - self.rows.keys())
        for row in self._cleared_last(missing) if missing else ():
            if (key := _key_of(row)) in missing:
                self.progress[key] = progress_of(row).successor()
        for key in missing - self.progress.keys():
            self.progress[key] = RuleProgress()

    def _within_limit(self, keys: set[EntryKey]) -> set[EntryKey]:
        """Return those of the new keys about which there may be entries, too."""
        number = Counter((key.rule, key.subject.node) for key in self.rows if key.subject.item)
        found = set()
        for key in sorted(keys):
            place = key.rule, key.subject.node
            if key.subject.item and key.subject.node:
                number[place] += 1
            if number[place] <= MAX_ITEMS or not key.subject.item:
                found.add(key)
        return found

    def _cleared_last(self, keys: set[EntryKey]) -> QuerySet[HealthEntry]:
        """Select the entry of each key that was cleared last: there may be thousands before, which it sums up."""
        rows = HealthEntry.objects.filter(
            node__in={key.subject.node for key in keys}, rule__in={key.rule for key in keys},
            state=State.CLEARED, cleared_at__gt=self.now - _MEMORY, is_planted=False,
        )  # fmt: skip
        newest = rows.order_by().values("node", "rule", "gpu", "item").annotate(newest=Max("pk"))
        found = HealthEntry.objects.filter(pk__in=list(newest.values_list("newest", flat=True)))
        return found.select_related("gpu").defer("evidence").order_by("pk")

    def take(self, rows: Iterable[HealthEntry]) -> None:
        for row in rows:
            key = _key_of(row)
            self.rows[key], self.progress[key] = row, progress_of(row, self.rules.get(row.rule))

    def observe(self, observation: Observation, only: set[EntryKey] | None = None) -> None:
        for rule in self._by_signal.get(observation.signal, ()):
            key = EntryKey(rule.name, observation.subject)
            if key not in self.progress or (only is not None and key not in only):
                continue
            self._advance(rule, key, observation.at)
            progress = self.progress[key]
            was_open = progress.state == "open"
            engine.observe(rule, progress, observation)
            if _matches(rule, observation):
                fields = {name: value for name, value in observation.fields.items() if value not in (None, "")}
                self.evidence[key].append([observation.at, observation.signal, fields, observation.count])
            is_late = observation.at < (self.now - LATE).timestamp()
            if progress.state == "open" and not was_open and is_late:
                self.late.add(key)

    def remove(self, keys: set[EntryKey]) -> None:
        """Note that what these findings are about no longer exists."""
        for key in keys & self.rows.keys():
            if (rule := self.rules.get(key.rule)) is not None:
                self._advance(rule, key, self.now.timestamp())
                engine.remove(rule, self.progress[key], self.now.timestamp())

    def _advance(self, rule: Rule, key: EntryKey, at: float) -> None:
        """Let time pass until an observation. If the finding was over by then, the observation begins another."""
        progress = self.progress[key]
        if engine.is_unread(progress, at):
            engine.advance_unread(rule, progress, at)
        engine.advance(rule, progress, at)
        if progress.state == "cleared" and key in self.rows:
            row = self.rows.pop(key)
            self._update(row, key, progress, rule)
            self.over.append(row)
            self.progress[key] = progress.successor()
            self.evidence.pop(key, None)
            self.late.discard(key)

    def repair(self, node: str, kind: engine.Repair, at: float) -> None:
        for key in self._keys_by_node[node]:
            if (rule := self.rules.get(key.rule)) is not None:
                engine.repair(rule, self.progress[key], kind, at)

    @cached_property
    def _keys_by_node(self) -> Mapping[str, list[EntryKey]]:
        found: defaultdict[str, list[EntryKey]] = defaultdict(list)
        for key in self.progress:
            found[key.subject.node].append(key)
        return found

    def save(self) -> None:
        changed, forgotten, new = [], [], []
        uuids = {key.subject.gpu for key in self.progress.keys() - self.rows.keys() if key.subject.gpu}
        gpus = {gpu.uuid: gpu for gpu in Gpu.objects.filter(uuid__in=uuids).only("uuid")} if uuids else {}
        for key, progress in self.progress.items():
            rule, row = self.rules.get(key.rule), self.rows.get(key)
            if rule is not None:
                engine.advance_unread(rule, progress, self.now.timestamp())
            elif row is not None and key.rule not in self.unreadable:  # the rule was switched off or removed
                engine.clear(progress, self.now.timestamp())
            if row is None:
                if rule is None or not progress.is_active or (key.subject.gpu and key.subject.gpu not in gpus):
                    continue
                row = self.rows[key] = _new_row(rule, key.subject, gpus.get(key.subject.gpu))
                if evidence.is_planted(self.evidence[key]):
                    row.is_planted, row.title = True, f"{rule.title[: MAX_TITLE - len(PLANTED)]}{PLANTED}"
                new.append(row)
            elif progress.state == "none":
                forgotten.append(row.pk)
                continue
            elif not self._is_changed(key, progress):
                continue
            else:
                changed.append(row)
            self._update(row, key, progress, rule)
        HealthEntry.objects.filter(pk__in=forgotten).delete()
        bulk.update_rows([*self.over, *changed], _CHANGED)
        HealthEntry.objects.bulk_create(new)  # after those that are over: there is one active entry about a subject

    def _is_changed(self, key: EntryKey, progress: RuleProgress) -> bool:
        """Return whether the row must be written: not for each reading of a state that just lasts."""
        before = progress_of(self.rows[key])
        age = (progress.last_seen or 0) - (before.last_seen or 0)
        unread = 0.0
        if before.read_at is not None and progress.read_at is not None and progress.state == before.state:
            is_needed = progress.state == "watching" or progress.good_since is not None
            unread = progress.read_at - before.read_at if is_needed else 0.0
            before.read_at = progress.read_at
        before.last_seen = progress.last_seen
        return before != progress or age >= REFRESH_S or unread >= REREAD_S

    def _update(self, row: HealthEntry, key: EntryKey, progress: RuleProgress, rule: Rule | None) -> None:
        was_open = row.state in (State.OPEN, State.DISMISSED)
        if progress.state == "open" and not was_open:
            row.state = State.OPEN
            self.evaluation.opened.append(row)
        elif progress.state == "cleared":
            row.state = State.CLEARED
        if rule is not None:
            row.severity, action = engine.effective(rule, progress)
            if was_open:  # a policy or a rule that was changed since takes no node out for what was open before
                row.action = min(row.action, action, key=ACTIONS.index)
            else:
                row.action = "ignore" if self.modes.get(action) == policies.Mode.IGNORE else action
            due = engine.next_change(rule, progress)
            row.due_at = None if due is None else _moment(due)
        row.count = progress.count
        row.first_seen, row.last_seen = _moment(progress.first_seen or 0), _moment(progress.last_seen or 0)
        row.opened_at = None if progress.opened_at is None else _moment(progress.opened_at)
        row.cleared_at = _moment(progress.cleared_at or 0) if progress.state == "cleared" else None
        row.is_late = row.is_late or key in self.late
        if new := self.evidence[key]:
            if row.is_planted and not evidence.is_planted(new):
                row.is_planted, row.title = False, rule.title if rule else row.title
            row.evidence = evidence.merged(row.observations(hidden=()), new)
            row.detail = str(new[-1][2].get("outdated", ""))[:MAX_DETAIL]
        row.progress = progress.as_payload()


_MEMORY = timedelta(days=366)
"""How long a cleared entry counts towards an escalation; no rule looks back further than a year."""
_CHANGED = (
    "title", "state", "severity", "action", "count", "first_seen", "last_seen", "opened_at", "cleared_at", "due_at",
    "is_planted", "is_late", "evidence", "detail", "progress",
)  # fmt: skip


def _new_row(rule: Rule, subject: Subject, gpu: Gpu | None) -> HealthEntry:
    return HealthEntry(node=subject.node, gpu=gpu, item=subject.item, rule=rule.name, title=rule.title)


def _active_rules() -> dict[Subject, set[str]]:
    """Return by subject the rules that have an active entry about it."""
    found: defaultdict[Subject, set[str]] = defaultdict(set)
    rows = HealthEntry.objects.active().values_list("rule", "node", "gpu__uuid", "item")
    for rule, node, gpu, item in rows:
        found[Subject(node, gpu or "", item)].add(rule)
    return found


def _key_of(row: HealthEntry) -> EntryKey:
    return EntryKey(row.rule, Subject(row.node, row.gpu.uuid if row.gpu else "", row.item))


def _matches(rule: Rule, observation: Observation) -> bool:
    return any(trigger.matches(observation.signal, observation.fields) for trigger in rule.triggers)


def _batches(subjects: Sequence[Subject]) -> Iterator[Sequence[Subject]]:
    for start in range(0, len(subjects), MAX_ENTRIES):
        yield subjects[start : start + MAX_ENTRIES]


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)
