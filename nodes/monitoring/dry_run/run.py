"""Apply one rule to what is stored of the last days: what it would have found, and what would have followed.

The engine is that of live evaluation (nodes.health.engine). Machines are read a few at a time, and everything is
bounded: days, rows of events, findings, listed entries and time. What was left out, and what cannot be tried because no
history of its signal is stored, is part of the result.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from operator import attrgetter

from django.core.cache import cache
from django.db.models import Q
from django.utils import timezone

from nodes.health.progress import Subject
from nodes.health.readings import StateReadings, replay_readings
from nodes.health.rehearsal import Outcome, Rehearsal, RehearsedDecision, rehearse
from nodes.health.replay import RepairStep, ReplayedEntry, Step, replay
from nodes.health.rules.condition import FieldValue
from nodes.health.rules.rule import Rule, Trigger
from nodes.models import Agent, Gpu, HealthEntry, Holding, Node, Partition
from nodes.monitoring.dry_run.events import STORED_SIGNALS, EventWindow
from nodes.monitoring.dry_run.fields import STORED_FIELDS, sampled_subjects, usually_up
from nodes.monitoring.dry_run.mounts import MountHistory
from nodes.monitoring.dry_run.samples import StoredSamples
from portal.models import User
from vigil_core import formatting

DAYS = 30
BUDGET_S = 20.0
MAX_EVENTS = 200_000
MAX_FOUND = 20_000
"""Findings after which the dry run stops: a rule that opens so often is wrong, and the page says so."""
MAX_LISTED = 200
MAX_JOBS_PER_ENTRY = 8
MAX_GPUS_PER_NODE = 16
"""As many allocations as that may belong to one job on a node."""
AT_ONCE = 16
"""Machines that are read together."""


@dataclass(frozen=True)
class DryRunEntry:
    """A finding that the rule would have opened. `gpu` is the GPU's index; None: it is about the node."""

    node: str
    gpu: int | None
    gpu_uuid: str
    item: str
    opened_at: datetime
    cleared_at: datetime | None
    severity: str
    action: str
    count: int
    signal: str
    observed: Mapping[str, FieldValue]
    outcome: Outcome
    held_back: str
    jobs: Sequence[str]


@dataclass
class RuleDryRun:
    """The result of a dry run. `cut` says why it ended early; `untried` what no history is stored for."""

    rule: str
    start: datetime
    end: datetime
    nodes: int = 0
    nodes_read: int = 0
    found: int = 0
    entries: list[DryRunEntry] = field(default_factory=list)
    outcomes: dict[str, int] = field(default_factory=dict)
    nodes_drained: int = 0
    tripped_at: datetime | None = None
    recorded: int = 0
    """Entries that the current rule of this name opened in that time."""
    untried: list[str] = field(default_factory=list)
    cut: str = ""
    seconds: float = 0.0


def dry_run(
    rule: Rule, *, days: int = DAYS, now: datetime | None = None, budget_s: float | None = BUDGET_S
) -> RuleDryRun:
    """Apply the rule to the last `days`, at most DAYS, for about `budget_s` seconds."""
    return _DryRunReader(rule, min(max(1, days), DAYS), now or timezone.now(), budget_s).run()


def dry_run_for(user: User, rule: Rule, *, days: int = DAYS) -> RuleDryRun | None:
    """Try the rule for a person; None while their previous dry run is still running: each takes a core for seconds."""
    key = f"health-dry-run-{user.pk}"
    if not cache.add(key, True, timeout=4 * int(BUDGET_S)):
        return None
    try:
        return dry_run(rule, days=days)
    finally:
        cache.delete(key)


def untried(rule: Rule) -> list[str]:
    """Return a sentence per signal or field of the rule of which no history is stored."""
    found = []
    for trigger in rule.triggers:
        name, missing = trigger.signal.name, sorted(_missing_fields(trigger))
        if not _is_stored(name):
            found.append(f"No history of the signal {name} is stored: it can only be tried on the rule's examples.")
        elif missing:
            names = formatting.listed(missing)
            found.append(f"No history of {names} ({name}) is stored: it can only be tried on the rule's examples.")
    return list(dict.fromkeys(found))


def _is_stored(signal: str) -> bool:
    return signal in STORED_SIGNALS or signal in STORED_FIELDS


def _missing_fields(trigger: Trigger) -> set[str]:
    stored = STORED_FIELDS.get(trigger.signal.name)
    return set() if stored is None else set(trigger.where) - stored


class _Stop(Exception):
    """Raised when a bound is reached; the message is what the result says."""


class _DryRunReader:
    def __init__(self, rule: Rule, days: int, now: datetime, budget_s: float | None) -> None:
        self.rule = rule
        self.result = RuleDryRun(rule.name, now - timedelta(days=days), now, untried=untried(rule))
        self.deadline = None if budget_s is None else time.monotonic() + budget_s
        self.budget_s = budget_s
        self.rows_left = MAX_EVENTS
        self.found: list[ReplayedEntry] = []
        self.gpus: dict[str, tuple[int, int]] = {}
        """Row id and index by UUID."""
        tried = [trigger for trigger in rule.triggers if not _missing_fields(trigger)]
        self.signals = sorted({trigger.signal.name for trigger in tried if _is_stored(trigger.signal.name)})

    def run(self) -> RuleDryRun:
        began = time.monotonic()
        agents = Agent.objects.filter(is_made_up=False).order_by("node")
        pks = list(agents.values_list("pk", flat=True)) if self.signals else []
        self.result.nodes = len(pks)
        try:
            for start in range(0, len(pks), AT_ONCE):
                some = list(agents.filter(pk__in=pks[start : start + AT_ONCE]).defer("processes"))
                self._read(some)
                self.result.nodes_read += len(some)
        except _Stop as stop:
            self.result.cut = str(stop)
        self._decide()
        since = Q(rule=self.rule.name, opened_at__gte=self.result.start, opened_at__lte=self.result.end)
        self.result.recorded = HealthEntry.objects.filter(since).count()
        self.result.seconds = time.monotonic() - began
        return self.result

    def _read(self, agents: Sequence[Agent]) -> None:
        gpus = {gpu.pk: gpu for gpu in Gpu.objects.filter(agent__in=agents).defer("facts", "counters")}
        self.gpus |= {gpu.uuid: (gpu.pk, gpu.index) for gpu in gpus.values()}
        window = EventWindow(self.rule, self.result.start, self.result.end, self._mounts, self.rows_left)
        events = window.read(agents, gpus)
        self.gpus |= {row.gpu.uuid: (row.gpu.pk, row.gpu.index) for row in events.rows if row.gpu is not None}
        self.rows_left -= len(events.rows)
        steps, repairs = events.steps()
        for subject, readings in self._samples(agents, gpus):
            self._replay(subject, steps.pop(subject, ()), readings, repairs.get(subject.node, ()))
        for subject, observations in steps.items():
            self._replay(subject, observations, None, repairs.get(subject.node, ()))
        if events.is_cut:
            raise _Stop(f"Stopped after {MAX_EVENTS:,} events: {self._extent()}")

    @cached_property
    def _mounts(self) -> MountHistory:
        if "mount" not in self.signals:
            return MountHistory()
        return MountHistory.read(self.result.start, self.result.end, MAX_EVENTS)

    @cached_property
    def _ports_usually_up(self) -> Callable[[str], bool]:
        return usually_up()

    def _samples(self, agents: Sequence[Agent], gpus: Mapping[int, Gpu]) -> Iterator[tuple[Subject, StateReadings]]:
        start, end = int(self.result.start.timestamp()), int(self.result.end.timestamp())
        for signal in self.signals:
            if signal in STORED_FIELDS:
                usually_up = self._ports_usually_up if signal == "port" else bool
                subjects = list(sampled_subjects(signal, agents, gpus.values(), usually_up))
                yield from StoredSamples(self.rule, agents, start, end).readings(subjects)

    def _replay(
        self, subject: Subject, events: Sequence[Step], readings: StateReadings | None, repairs: Sequence[RepairStep]
    ) -> None:
        self._check_time()
        repairs = sorted(repairs, key=_at)
        for entry in self._entries(subject, events, readings, repairs, self.result.end.timestamp()):
            self._check_time()
            if entry.opened_at < self.result.start.timestamp():
                continue
            self.found.append(entry)
            if len(self.found) >= MAX_FOUND:
                raise _Stop(f"Stopped after {MAX_FOUND:,} findings: the rule opens far too often. {self._extent()}")

    def _entries(
        self,
        subject: Subject,
        events: Sequence[Step],
        readings: StateReadings | None,
        repairs: Sequence[RepairStep],
        until: float,
    ) -> Iterator[ReplayedEntry]:
        if readings is not None and not events:
            return replay_readings(self.rule, subject, readings, repairs, until)
        sampled = readings.edges() if readings is not None else ()
        return replay(self.rule, subject, self._timed(sorted([*events, *sampled, *repairs], key=_at)), until)

    def _timed(self, steps: Sequence[Step]) -> Iterator[Step]:
        for number, step in enumerate(steps):
            if number % 256 == 0:
                self._check_time()
            yield step

    def _check_time(self) -> None:
        if self.deadline is not None and time.monotonic() > self.deadline:
            raise _Stop(f"Stopped after {self.budget_s:.0f} s: {self._extent()}")

    def _extent(self) -> str:
        return f"{self.result.nodes_read:,} of {self.result.nodes:,} nodes were read."

    def _decide(self) -> None:
        self.found.sort(key=lambda entry: (entry.opened_at, entry.subject))
        self.result.found = len(self.found)
        rehearsal = self._rehearsal()
        for decision in rehearsal.decisions:
            self.result.outcomes[decision.outcome] = self.result.outcomes.get(decision.outcome, 0) + 1
        pairs = list(zip(self.found, rehearsal.decisions, strict=True))
        self.result.nodes_drained = len({e.subject.node for e, decision in pairs if decision.outcome == "drained"})
        self.result.tripped_at = None if rehearsal.tripped_at is None else _moment(rehearsal.tripped_at)
        listed = pairs[:MAX_LISTED]
        jobs = self._jobs([entry for entry, _ in listed])
        self.result.entries = [
            self._entry(entry, decision, jobs[number]) for number, (entry, decision) in enumerate(listed)
        ]

    def _rehearsal(self) -> Rehearsal:
        nodes = list(Node.objects.reported().values_list("name", "partitions"))
        partitions: dict[str, set[str]] = {
            name: set() for name in Partition.objects.reported().values_list("name", flat=True)
        }
        for node, names in nodes:
            for name in names:
                if name in partitions:
                    partitions[name].add(node)
        return rehearse(self.rule.name, self.found, partitions, {node for node, _ in nodes})

    def _jobs(self, entries: Sequence[ReplayedEntry]) -> list[list[str]]:
        """Return by entry the jobs that ran on its GPU, or anywhere on its node, when it opened."""
        if not entries:
            return []
        agents = dict(Agent.objects.filter(node__in={e.subject.node for e in entries}).values_list("node", "pk"))
        return [self._jobs_of(entry, agents.get(entry.subject.node)) for entry in entries]

    def _jobs_of(self, entry: ReplayedEntry, agent: int | None) -> list[str]:
        at = _moment(entry.opened_at)
        rows = Holding.objects.filter(Q(until=None) | Q(until__gte=at), agent=agent, since__lte=at)
        if (gpu := self.gpus.get(entry.subject.gpu, (None, None))[0]) is not None:
            rows = rows.filter(gpu=gpu)
        names = rows.order_by("-since").values_list("scheduler_id", flat=True)[: MAX_JOBS_PER_ENTRY * MAX_GPUS_PER_NODE]
        return list(dict.fromkeys(names))[:MAX_JOBS_PER_ENTRY]

    def _entry(self, entry: ReplayedEntry, decision: RehearsedDecision, jobs: Sequence[str]) -> DryRunEntry:
        observed = entry.observed
        return DryRunEntry(
            node=entry.subject.node,
            gpu=self.gpus.get(entry.subject.gpu, (0, None))[1],
            gpu_uuid=entry.subject.gpu,
            item=entry.subject.item,
            opened_at=_moment(entry.opened_at),
            cleared_at=None if entry.cleared_at is None else _moment(entry.cleared_at),
            severity=entry.severity,
            action=entry.action,
            count=entry.count,
            signal=observed.signal if observed else "",
            observed={n: v for n, v in observed.fields.items() if v not in (None, "")} if observed else {},
            outcome=decision.outcome,
            held_back=decision.held_back,
            jobs=jobs,
        )


def _moment(at: float) -> datetime:
    return datetime.fromtimestamp(at, UTC)


_at = attrgetter("at")
