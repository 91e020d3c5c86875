"""Read what happened on nodes since the last evaluation, as observations for health rules.

An event's row is judged once per count: `judged` says how much of it rules have seen, and moves in the transaction that
stores what they found. So nothing is counted twice or lost, wherever a worker is killed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

from django.db.models import F, Q

from nodes.health.engine import Repair
from nodes.health.progress import Observation, Subject
from nodes.health.rules.condition import FieldValue
from nodes.health.rules.rule import Rule
from nodes.health.xid_severity import xid_codes
from nodes.models import Holding, NodeEvent
from vigil_core import untrusted

MOST = 150
"""Rows per transaction: a storm of events must not keep it open."""
MAX_REPAIRED = 25
"""Nodes per transaction that booted or were reset: each of their findings is read, and there may be dozens."""
ECHO = timedelta(seconds=60)
CLEAN_UP = 45  # the Xid that follows others
RECOVERY_CHANGED = 154
_LONG = (
    "agent__facts", "agent__newest", "agent__processes", "agent__plant", "gpu__facts", "gpu__counters",
)  # fmt: skip
REPAIRS: dict[str, Repair] = {"boot": "boot", "driver.reloaded": "reset"}
UNJUDGED = Q(judged__lt=F("count"), agent__is_made_up=False)
_RECOVERY = re.compile(r"\bto 0x[0-9a-f]+ \(([^)]{1,40})\)", re.IGNORECASE)


_FATAL = re.compile(r"(?<!non)(?<!non-)fatal", re.IGNORECASE)


def listed_xids(rules: Iterable[Rule]) -> frozenset[int]:
    """Return the Xids that one of these rules names."""
    return frozenset[int]().union(*(xid_codes(trigger) for rule in rules for trigger in rule.triggers))


@dataclass(frozen=True)
class Judgement:
    """An event row, and what the rules make of it: an observation or a repair."""

    row: NodeEvent
    observation: Observation | None
    repair: Repair | None = None


def unjudged(rules: Iterable[Rule]) -> list[Judgement]:
    """Return some rows that the rules have not seen completely, oldest first, and what each of them says."""
    rows = NodeEvent.objects.filter(UNJUDGED).select_related("agent", "gpu").defer(*_LONG)
    found = list(rows.order_by("id")[:MOST])
    return list(judgements(sorted(_bounded(found), key=lambda row: (row.last_at, row.pk)), rules))


def _bounded(rows: Sequence[NodeEvent]) -> Sequence[NodeEvent]:
    """Return the first rows, up to the repairs of as many nodes as one transaction may change."""
    repaired: set[int] = set()
    for place, row in enumerate(rows):
        if row.kind in REPAIRS:
            repaired.add(row.agent_id)
            if len(repaired) > MAX_REPAIRED:
                return rows[:place]
    return rows


def judgements(rows: Sequence[NodeEvent], rules: Iterable[Rule], *, with_holders: bool = True) -> Iterator[Judgement]:
    """Yield what each of these rows says, in their order. `with_holders`: also whose job had the GPU."""
    listed = listed_xids(rules)
    xids = [row for row in rows if row.kind == "xid" and row.gpu_id is not None]
    echoes, holders = _echoes(xids), _holders(xids) if with_holders else {}
    for row in rows:
        at, count = row.last_at.timestamp(), row.count - row.judged
        if row.kind == "xid":
            user, program = holders.get(row.pk, ("", ""))
            fields: dict[str, FieldValue] = {
                "code": row.code,
                "text": row.text,
                "is_fatal": _FATAL.search(row.text) is not None,
                "is_listed": row.code in listed,
                "is_echo": row.pk in echoes,
                "is_implied": row.data.get("implied") is True,
                "recovery": _recovery(row),
                "user": user,
                "program": program,
                "planted": row.planted,
            }
            subject = Subject(row.agent.node, row.gpu.uuid if row.gpu else "")
            yield Judgement(row, Observation("xid", subject, at, fields, count))
        elif row.kind == "sxid":
            fields = {"code": row.code, "text": row.text, "is_fatal": row.data.get("fatal") is True}
            yield Judgement(row, Observation("sxid", Subject(row.agent.node), at, fields, count))
        elif row.kind == "link.down":
            subject = Subject(row.agent.node, item=untrusted.line(row.data.get("port"), 64))
            yield Judgement(row, Observation("link_down", subject, at, {}, count))
        else:
            yield Judgement(row, None, REPAIRS.get(row.kind))


def _echoes(rows: Sequence[NodeEvent]) -> set[int]:
    """Return the rows with Xid 45 whose newest one another Xid of the same GPU explains."""
    cleanups = [row for row in rows if row.code == CLEAN_UP]
    if not cleanups:
        return set()
    first, last = min(row.last_at for row in cleanups) - ECHO, max(row.last_at for row in cleanups) + ECHO
    others = NodeEvent.objects.filter(
        kind="xid", gpu__in={row.gpu_id for row in cleanups}, last_at__gte=first, at__lte=last
    ).exclude(code=CLEAN_UP)
    near: defaultdict[int | None, list[NodeEvent]] = defaultdict(list)
    for other in others.only("gpu", "at", "last_at"):
        near[other.gpu_id].append(other)
    return {
        row.pk
        for row in cleanups
        if any(other.at - ECHO <= row.last_at <= other.last_at + ECHO for other in near[row.gpu_id])
    }


def _holders(rows: Sequence[NodeEvent]) -> dict[int, tuple[str, str]]:
    """Return by row the user and the name of the job that had the GPU, if exactly one had it."""
    if not rows:
        return {}
    overlapping = Holding.objects.filter(
        Q(until=None) | Q(until__gte=min(row.at for row in rows)),
        gpu__in={row.gpu_id for row in rows},
        since__lte=max(row.last_at for row in rows),
    )
    by_gpu: defaultdict[int, list[Holding]] = defaultdict(list)
    for holding in overlapping.only("gpu", "user", "name", "scheduler_id", "since", "until"):
        by_gpu[holding.gpu_id].append(holding)
    found = {}
    for row in rows:
        jobs = [
            holding
            for holding in by_gpu[row.gpu_id or 0]
            if holding.since <= row.last_at and (holding.until is None or holding.until >= row.last_at)
        ]
        if len(jobs) == 1:
            found[row.pk] = jobs[0].user, jobs[0].name or jobs[0].scheduler_id
    return found


def _recovery(row: NodeEvent) -> str | None:
    """Return what Xid 154 recommends, as one word: none, reset, reboot, drain, …"""
    if row.code != RECOVERY_CHANGED or not (found := _RECOVERY.search(row.text)):
        return None
    words = found[1].lower()
    for word in ("reboot", "reset", "drain", "none"):
        if word in words:
            return word
    return words
