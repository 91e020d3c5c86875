"""Find what fails again and again: a node under different programs, or a program on different nodes.

Failures that the diagnosis puts down to a program say nothing about the node: ten researchers who try things out on one
node make it fail often. The two findings exclude each other, because a program counts once per node.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime, timedelta

from django.db.models import Count, Max, Sum

from jobs.failures.kinds import PROGRAMS
from jobs.models import Failure, NodeHeld
from jobs.reliability.allocations import AttemptAllocation, uncounted
from jobs.reliability.allocations import since as held_since
from jobs.reliability.offenders import NodeFailures, ProgramFailures, offenders
from nodes.health.progress import Subject
from nodes.health.rules.condition import FieldValue
from nodes.models import HealthEntry

WINDOW = timedelta(days=30)
PROGRAM_WINDOW = timedelta(days=14)
RULE = "repeat-offender"
LEAST_FAILURES = 3
MOST_PROGRAMS = 200
MOST_FAILURES = 100  # of one program that are read
DAY_S = 86_400.0
Fields = dict[str, FieldValue]


def failing_nodes(now: datetime) -> dict[Subject, Fields]:
    """Return the fields of `repeat_failures` of each node that fails more often than the others let expect."""
    since = (now - WINDOW).astimezone(UTC).date()
    repaired = _repaired(now)
    counted = _failures(since, repaired)
    seconds = _node_seconds(since, repaired, now)
    rows = [
        NodeFailures(name, counted[name].failures, len(counted[name].programs), seconds.get(name, 0.0) / DAY_S)
        for name in counted.keys() | seconds.keys()
    ]
    return {
        Subject(offender.counts.node): {
            "is_node": offender.is_node,
            "failures": offender.counts.failures,
            "expected": round(offender.expected, 3),
            "programs": offender.counts.programs,
            "chance": offender.chance,
            "programs_chance": offender.programs_chance,
        }
        for offender in offenders(rows)
    }


def failing_programs(now: datetime) -> dict[Subject, Fields]:
    """Return the fields of `program_failures` of each error that came several times."""
    since = (now - PROGRAM_WINDOW).astimezone(UTC).date()
    rows = Failure.objects.filter(day__gte=since, program__startswith="print ").exclude(incident=None)
    several = rows.order_by().values("program").annotate(n=Count("pk")).filter(n__gte=LEAST_FAILURES)
    names = list(several.order_by("-n").values_list("program", flat=True)[:MOST_PROGRAMS])
    found = {}
    for name in names:
        newest = rows.filter(program=name).select_related("incident__attempt__job__owner").order_by("-at")
        failures = list(newest[:MOST_FAILURES])
        if failures[0].incident is None:  # deleted meanwhile
            continue
        places = [failure.incident.attempt.nodes for failure in failures if failure.incident]
        job = failures[0].incident.attempt.job
        found[Subject("", "", f"program {name.removeprefix('print ')}")] = {
            **asdict(ProgramFailures.count(places)),
            "user": job.owner.username,
            "program": f"#{job.pk} {job.name}",
        }
    return found


@dataclass
class _NodeCounts:
    failures: int = 0
    programs: set[str] = field(default_factory=set)


def _repaired(now: datetime) -> dict[str, datetime]:
    """Return when each node's finding was last cleared: what happened before is not held against it again."""
    rows = HealthEntry.objects.filter(rule=RULE, state="cleared", cleared_at__gt=now - WINDOW)
    return dict(rows.order_by().values_list("node").annotate(Max("cleared_at")))


def _failures(since: date, repaired: Mapping[str, datetime]) -> dict[str, _NodeCounts]:
    found: defaultdict[str, _NodeCounts] = defaultdict(_NodeCounts)
    rows = Failure.objects.filter(day__gte=since).exclude(node="").exclude(cause__in=PROGRAMS).order_by()
    for node, program, at in rows.values_list("node", "program", "at").iterator():
        if node not in repaired or at > repaired[node]:
            found[node].failures += 1
            found[node].programs.add(program)
    return found


def _node_seconds(since: date, repaired: Mapping[str, datetime], now: datetime) -> dict[str, float]:
    """Return allocated seconds by node; of a node that was repaired, those of the days after that."""
    rows = NodeHeld.objects.filter(held_since(since)).exclude(node__in=list(repaired)).order_by()
    found: defaultdict[str, float] = defaultdict(float, rows.values_list("node").annotate(Sum("node_s")))
    for node, day, seconds in NodeHeld.objects.filter(
        days=1, node__in=list(repaired), day__gte=min((at.date() for at in repaired.values()), default=now.date())
    ).values_list("node", "day", "node_s"):
        if day > repaired[node].astimezone(UTC).date():
            found[node] += seconds
    return _with_open(found, uncounted(now), since, repaired)


def _with_open(
    found: defaultdict[str, float],
    allocations: Iterable[AttemptAllocation],
    since: date,
    repaired: Mapping[str, datetime],
) -> dict[str, float]:
    for allocation in allocations:
        for node in allocation.nodes:
            first = repaired[node].astimezone(UTC).date() if node in repaired else since
            found[node] += allocation.seconds(first)
    return found
