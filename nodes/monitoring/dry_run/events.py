"""Read stored events (Xids, SXids, repairs, lost GPUs, hung drivers, slow mounts) as the observations of a rule.

A row counts equal events between its first and last time; those between are taken as evenly spread. A lasting event is
a state that began and ended: it is observed at its ends, and where a duration that a rule names is reached.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import islice

from django.db.models import Q, QuerySet

from nodes.health.progress import Observation, Subject
from nodes.health.replay import RepairStep, Step
from nodes.health.rules.condition import FieldValue
from nodes.health.rules.rule import Rule
from nodes.models import Agent, Gpu, GpuPlace, NodeEvent
from nodes.models.health import PEOPLE
from nodes.monitoring import events
from nodes.monitoring.dry_run.mounts import MountHistory
from nodes.monitoring.site_rules import rules_in_force
from vigil_core import untrusted

LASTING = {"gpu_lost": "gpu.lost", "nvml": "gpu.silent", "mount": "mount.slow"}
"""Signals that lasting events tell, with the events' kind."""
MOMENTS = {"sxid": "sxid", "link_down": "link.down"}
"""Signals that events tell one by one, with the events' kind; Xids are selected by code, too."""
STORED_SIGNALS = frozenset({"xid", *MOMENTS, *LASTING})
"""Signals that events tell, with all their fields."""
MAX_SPREAD = 100
"""Observations of one row, however often it counted."""
OLDER = timedelta(days=7)
"""How long before the beginning a row may have begun that ended after it; rows that are open may be older."""
LIVE_S = 5.0


@dataclass(frozen=True)
class EventWindow:
    """What to read: the events of a rule's signals between two moments, and at most so many rows."""

    rule: Rule
    start: datetime
    end: datetime
    mounts: MountHistory
    most: int

    def read(self, agents: Sequence[Agent], gpus: Mapping[int, Gpu]) -> StoredEvents:
        found = list(islice((row for row in self._rows(agents) if not row.is_planted), self.most + 1))
        by_agent = {agent.pk: agent for agent in agents}
        moved = {row.gpu_id for row in found if row.gpu_id is not None} - gpus.keys()
        everywhere = {**gpus, **{gpu.pk: gpu for gpu in Gpu.objects.filter(pk__in=moved)}} if moved else gpus
        for row in found:
            row.agent = by_agent[row.agent_id]
            row.gpu = everywhere.get(row.gpu_id) if row.gpu_id is not None else None
            row.judged = 0  # rules have taken it into account long ago; this one has not
        rows = found[: self.most]
        return StoredEvents(self, rows, len(found) > self.most, _vanished_until(rows, self.end))

    def _rows(self, agents: Sequence[Agent]) -> Iterator[NodeEvent]:
        rows = NodeEvent.objects.filter(agent__in=[agent.pk for agent in agents]).filter(self._wanted()).defer(
            "boot_id", "first_seq", "last_seq", "fingerprint"
        )  # fmt: skip
        since = self.start - OLDER
        recent = rows.filter(at__gte=since, at__lte=self.end, last_at__gte=self.start)
        still_open = rows.filter(at__lt=since, is_open=True, kind__in=self._lasting)
        if self._lasting:
            yield from still_open.order_by("at", "id")
        yield from _in_order(recent)

    @property
    def _lasting(self) -> list[str]:
        return [LASTING[name] for name in self.rule.signals if name in LASTING]

    def _wanted(self) -> Q:
        kinds = [MOMENTS[name] for name in self.rule.signals if name in MOMENTS]
        wanted = Q(kind__in=[*kinds, *self._lasting, *events.REPAIRS])
        if "xid" in self.rule.signals:
            codes = _codes(self.rule)
            wanted |= Q(kind="xid") if codes is None else Q(kind="xid", code__in=codes)
        return wanted


@dataclass(frozen=True)
class StoredEvents:
    """The events of some machines."""

    window: EventWindow
    rows: Sequence[NodeEvent]
    is_cut: bool
    vanished_until: Mapping[int, datetime]
    """When GPUs that vanished were there again, by their event's row."""

    def steps(self) -> tuple[dict[Subject, list[Step]], dict[str, list[RepairStep]]]:
        """Return the observations by subject, and the repairs by node."""
        steps: defaultdict[Subject, list[Step]] = defaultdict(list)
        repairs: defaultdict[str, list[RepairStep]] = defaultdict(list)
        lasting = {kind: signal for signal, kind in LASTING.items()}
        moments = [row for row in self.rows if row.kind not in lasting]
        rules = (*rules_in_force().values(), self.window.rule)
        for row in self.rows:
            if row.kind in lasting:
                for observation in self._lasting(row, lasting[row.kind]):
                    steps[observation.subject].append(observation)
        for start in range(0, len(moments), events.MOST):
            some = moments[start : start + events.MOST]
            for judgement in events.judgements(some, rules, with_holders=_names_people(self.window.rule)):
                if judgement.observation is not None:
                    steps[judgement.observation.subject] += _spread(judgement.row, judgement.observation)
                elif judgement.repair is not None:
                    step = RepairStep(judgement.row.last_at.timestamp(), judgement.repair)
                    repairs[judgement.row.agent.node].append(step)
        return steps, repairs

    def _lasting(self, row: NodeEvent, signal: str) -> Iterator[Observation]:
        """Yield the state at its beginning, where a duration that the rule names is reached, and at its end."""
        began, node = row.at.timestamp(), row.agent.node
        end = self.window.end if row.is_open else self.vanished_until.get(row.pk, row.last_at)
        ended, is_over = end.timestamp(), end < self.window.end
        moments = {began, max(began, ended - LIVE_S), *self._thresholds(signal, began, ended)}
        if signal == "gpu_lost":
            subject, ramp, problem = Subject(node, row.gpu.uuid if row.gpu else ""), "", ""
        elif signal == "nvml":
            subject, ramp, problem = Subject(node), "silent_s", ""
        else:
            mount = untrusted.line(row.data.get("mount"), 300)
            subject, ramp = Subject(node, item=mount), "slow_s"
            problem = untrusted.line(row.data.get("problem"), 200)
            moments |= self.window.mounts.changes(row, ended)
        for at in sorted(moments):
            yield Observation(signal, subject, at, self._fields(row, signal, ramp, at - began, problem, at))
        if is_over:
            over: dict[str, FieldValue] = (
                {"is_lost": False} if signal == "gpu_lost" else {"silent_s": 0.0} if signal == "nvml" else
                {"is_slow": False, "slow_s": 0.0, "problem": "", "affected_share": self.window.mounts.share(row, ended)}
            )  # fmt: skip
            yield Observation(signal, subject, max(ended, began), over)

    def _fields(
        self, row: NodeEvent, signal: str, ramp: str, duration_s: float, problem: str, at: float
    ) -> dict[str, FieldValue]:
        if signal == "gpu_lost":
            return {"is_lost": True}
        if signal == "nvml":
            return {ramp: duration_s}
        share = self.window.mounts.share(row, at)
        return {"is_slow": True, ramp: duration_s, "problem": problem, "affected_share": share}

    def _thresholds(self, signal: str, began: float, ended: float) -> set[float]:
        """Return when the state has lasted as long as the rule's conditions name."""
        conditions = [
            condition
            for trigger in self.window.rule.triggers
            if trigger.signal.name == signal
            for name, condition in trigger.where.items()
            if name in ("silent_s", "slow_s")
        ]
        durations = [float(c.operand) for c in conditions if isinstance(c.operand, float)]
        moments = {began + more for seconds in durations for more in (seconds, seconds + LIVE_S)}
        return {moment for moment in moments if began <= moment < ended}


def _vanished_until(rows: Sequence[NodeEvent], end: datetime) -> dict[int, datetime]:
    """Return until when GPUs that vanished were missing, by row: their events close once facts do not list them.

    A GPU is missing until it is back, or until its node has another one that it never had.
    """
    vanished = [row for row in rows if row.kind == "gpu.lost" and row.data.get("reason") == "vanished"]
    if not vanished:
        return {}
    gpus, agents = {row.gpu_id for row in vanished}, {row.agent_id for row in vanished}
    came: defaultdict[int, list[datetime]] = defaultdict(list)
    first: defaultdict[int, dict[int, datetime]] = defaultdict(dict)
    for place in GpuPlace.objects.filter(Q(gpu__in=gpus) | Q(agent__in=agents)).order_by("since"):
        came[place.gpu_id].append(place.since)
        first[place.agent_id].setdefault(place.gpu_id, place.since)
    return {
        row.pk: min((at for at in (*came[row.gpu_id or 0], *first[row.agent_id].values()) if at > row.at), default=end)
        for row in vanished
        if not row.is_open
    }


def _spread(row: NodeEvent, observation: Observation) -> Iterator[Observation]:
    """Yield a row's events as observations from its first to its last time, evenly spread."""
    first, last, count = row.at.timestamp(), row.last_at.timestamp(), observation.count
    number = min(count, MAX_SPREAD) if last > first else 1
    if number == 1:
        yield replace(observation, at=last)
        return
    for place in range(number):
        share = count * (place + 1) // number - count * place // number
        yield replace(observation, at=first + (last - first) * place / (number - 1), count=share)


def _codes(rule: Rule) -> set[int] | None:
    """Return the Xids that the rule asks for; None: any may count."""
    found: set[int] = set()
    for trigger in rule.triggers:
        if trigger.signal.name != "xid":
            continue
        condition = trigger.where.get("code")
        if condition is None or not isinstance(condition.operand, tuple):
            return None
        found |= {code for code in condition.operand if isinstance(code, int) and abs(code) < 2**31}
    return found


def _names_people(rule: Rule) -> bool:
    return any(PEOPLE & (trigger.where.keys() | trigger.distinct.keys()) for trigger in rule.triggers)


def _in_order(rows: QuerySet[NodeEvent]) -> Iterator[NodeEvent]:
    return rows.order_by("at", "id").iterator(chunk_size=1_000)
