"""Find what fails again and again: a node under different programs, or a program on different nodes.

Failures that the diagnosis puts down to a program say nothing about the node: ten researchers who try things out on one
node make it fail often. The two findings exclude each other, because a program counts once per node. Failures that
nothing explains, or that only the job's own log puts down to the machine, count once per person.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, date, datetime, timedelta

from django.db.models import Count, QuerySet, Sum

from jobs.assessing.repairs import repaired_at
from jobs.failures.incidents import CLAIMS, ERROR
from jobs.failures.kinds import PROGRAMS, UNDIAGNOSED
from jobs.models import Failure, NodeHeld
from jobs.reliability.node_time import AttemptAllocation, rows_since, uncounted
from jobs.reliability.offenders import NodeFailures, ProgramFailures, offenders
from nodes.health.progress import Subject
from nodes.health.rules.condition import FieldValue

WINDOW = timedelta(days=30)
PROGRAM_WINDOW = timedelta(days=14)
TIME_LIMIT = "scheduler.time_limit"
MIN_FAILURES = 3
MAX_PROGRAMS = 200
MAX_FAILURES = 100  # of one program that are read
DAY_S = 86_400.0
Fields = dict[str, FieldValue]


def failing_nodes(now: datetime) -> dict[Subject, Fields]:
    """Return the fields of `repeat_failures` by node.

    It has the nodes that fail more often than expected from their node-days.
    """
    since = (now - WINDOW).astimezone(UTC).date()
    repaired = {node: at.astimezone(UTC).date() for node, at in repaired_at("repeat_failures", now - WINDOW).items()}
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
            "owners": len(counted[offender.counts.node].owners),
            "chance": offender.chance,
            "programs_chance": offender.programs_chance,
        }
        for offender in offenders(rows)
    }


def failing_programs(now: datetime) -> dict[Subject, Fields]:
    """Return the fields of `program_failures` of each error that one person's programs had several times."""
    rows = errors_of_programs(now)
    several = rows.order_by().values("program").annotate(n=Count("pk")).filter(n__gte=MIN_FAILURES)
    names = list(several.order_by("-n").values_list("program", flat=True)[:MAX_PROGRAMS])
    by_program = {}
    for name in names:
        newest = rows.filter(program=name).select_related("incident__attempt__job__owner").order_by("-at")
        attempts = [failure.incident.attempt for failure in newest[:MAX_FAILURES] if failure.incident]
        if not attempts:  # deleted meanwhile
            continue
        job = attempts[0].job
        by_program[Subject("", "", f"program {name.removeprefix(ERROR)}")] = {
            **asdict(ProgramFailures.count([attempt.nodes for attempt in attempts])),
            "user": job.owner.username,
            "program": f"#{job.pk} {job.name}",
        }
    return by_program


def errors_of_programs(now: datetime) -> QuerySet[Failure]:
    """Return the recent failures that a program's own error explains; a run that needs more time has no error."""
    since = (now - PROGRAM_WINDOW).astimezone(UTC).date()
    rows = Failure.objects.filter(day__gte=since, program__startswith=ERROR)
    return rows.exclude(cause=TIME_LIMIT).exclude(incident=None)


@dataclass
class _NodeCounts:
    failures: int = 0
    programs: set[str] = field(default_factory=set)
    owners: set[str] = field(default_factory=set)

    def add(self, program: str, owner: str) -> None:
        is_new = program not in self.programs
        self.failures += is_new or not program.startswith(CLAIMS)
        self.programs.add(program)
        self.owners.add(owner)


def _failures(since: date, repaired: Mapping[str, date]) -> dict[str, _NodeCounts]:
    """Return what failed by node; on one that was repaired, from the day after, as its node-days are counted.

    Of a job that was deleted only the project is still known: it stands for the owner.
    """
    by_node: defaultdict[str, _NodeCounts] = defaultdict(_NodeCounts)
    rows = Failure.objects.filter(day__gte=since).exclude(node="").exclude(cause__in=PROGRAMS).order_by()
    values = rows.values_list("node", "day", "cause", "program", "project", "incident__attempt__job__owner")
    for node, day, cause, program, project, owner_id in values.iterator():
        if node not in repaired or day > repaired[node]:
            owner = f"project {project}" if owner_id is None else str(owner_id)
            by_node[node].add(f"{CLAIMS}{owner}" if cause in UNDIAGNOSED else program, owner)
    return by_node


def _node_seconds(since: date, repaired: Mapping[str, date], now: datetime) -> dict[str, float]:
    """Return allocated seconds by node; of a node that was repaired, those of the days after that."""
    rows = NodeHeld.objects.filter(rows_since(since)).exclude(node__in=list(repaired)).order_by()
    found: defaultdict[str, float] = defaultdict(float, rows.values_list("node").annotate(Sum("node_s")))
    for node, day, seconds in NodeHeld.objects.filter(
        days=1, node__in=list(repaired), day__gte=min(repaired.values(), default=now.date())
    ).values_list("node", "day", "node_s"):
        if day > repaired[node]:
            found[node] += seconds
    return _with_open(found, uncounted(now), since, repaired)


def _with_open(
    found: defaultdict[str, float],
    allocations: Iterable[AttemptAllocation],
    since: date,
    repaired: Mapping[str, date],
) -> dict[str, float]:
    for allocation in allocations:
        for node in allocation.nodes:
            first = repaired[node] + timedelta(days=1) if node in repaired else since
            found[node] += allocation.seconds(first)
    return found
