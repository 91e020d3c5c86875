"""Report failures over the last days by cause, node, rack, partition, project or week, as far as a person may see them.

Allocated time comes from daily sums, plus attempts that are not in the sums yet; failures are counted directly. If the
site shows everybody's jobs, the numbers are everybody's; otherwise they cover a person's own projects.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from itertools import dropwhile
from typing import Any

import numpy as np
from django.db.models import Count, Sum
from django.urls import reverse

from diagnosis.causes import CAUSES
from jobs.failures.kinds import causes_of
from jobs.models import Failure, NodeHeld, ProjectHeld, ProjectNodeHeld
from jobs.reliability.node_time import monday, rows_since, uncounted
from jobs.reliability.offenders import NodeFailures, Offender, offenders
from jobs.reliability.rate import Rate
from nodes.models import RackPlace
from portal.access import sees_all
from portal.bulk import chunks
from portal.models import Project, User

DAY_S, HOUR_S = 86_400.0, 3_600.0
WINDOWS = (7, 30, 90, 365)
GROUPINGS = ("cause", "node", "rack", "partition", "project", "week")
MAX_TIMES = 3_000  # newest failures used for medians
SOME_S = 1.0  # rounding error of sums that are added and subtracted again
NO_NODE, NO_RACK, NO_PARTITION = "on several nodes", "in no rack", "none named"
NOT_DIAGNOSED = "not diagnosed"


@dataclass(frozen=True, kw_only=True)
class FailureFilter:
    """The filters of the report. `kind` is all, machines or programs; `project` is a slug."""

    days: int = 30
    by: str = "cause"
    kind: str = "all"
    project: str = ""

    def since(self, now: datetime) -> date:
        """Return the first day; the last one is today in UTC."""
        return now.astimezone(UTC).date() - timedelta(days=self.days - 1)


@dataclass(frozen=True)
class FailureRow:
    """Failures of one cause, node, rack, partition, project or week, and the node-days in which they could happen."""

    name: str
    rate: Rate
    lost_gpu_hours: float = 0.0
    detect_s: float | None = None
    recover_s: float | None = None
    link: str = ""
    title: str = ""
    since: date | None = None  # of a week


@dataclass(frozen=True)
class FailureReport:
    """The report. `effective` is the share of queued and allocated time of ended jobs that produced useful steps."""

    rows: list[FailureRow]
    total: FailureRow
    effective: float | None
    offenders: list[Offender]
    weeks: list[FailureRow]
    interruptions: Rate
    """Failures that may affect any run, or that a run continued after, of the requested kind."""


@dataclass
class _Counts:
    failures: int = 0
    node_s: float = 0.0
    lost_gpu_s: float = 0.0

    def row(self, name: str, **more: Any) -> FailureRow:
        return FailureRow(name, Rate(self.failures, self.node_s / DAY_S), self.lost_gpu_s / HOUR_S, **more)


def find(user: User, filters: FailureFilter, now: datetime) -> FailureReport:
    query = _FailureQuery(user, filters, now)
    total, medians = query.total(), query.medians()
    detect, recover = medians.get(None, (None, None))
    return FailureReport(
        query.rows(total, medians),
        total.row("all", detect_s=detect, recover_s=recover),
        query.effective(),
        query.offenders(),
        query.weeks(),
        query.interruptions(total),
    )


def interruptions(user: User, filters: FailureFilter, now: datetime) -> tuple[Rate, float | None]:
    """Return the rate of interruptions, and the median seconds until training resumed."""
    query = _FailureQuery(user, filters, now)
    return query.interruptions(query.total()), query.medians().get(None, (None, None))[1]


Medians = dict[str | None, tuple[float | None, float | None]]


class _FailureQuery:
    """The queries of a report; results needed more than once are cached."""

    def __init__(self, user: User, filters: FailureFilter, now: datetime) -> None:
        self.user, self.filters, self.now = user, filters, now
        self.since = filters.since(now)
        self.projects = _projects(user, filters.project)
        """Projects included; None for all."""
        self.live = [
            allocation for allocation in uncounted(now) if self.projects is None or allocation.project in self.projects
        ]
        causes = causes_of(filters.kind)
        failures = Failure.objects.filter(day__gte=self.since, **({} if causes is None else {"cause__in": causes}))
        self.failures = self._visible(failures)
        self._cache: dict[tuple[str, str], Any] = {}

    def _visible(self, rows: Any) -> Any:
        return rows if self.projects is None else rows.filter(project__in=self.projects)

    def total(self) -> _Counts:
        found = _Counts(0, sum(self._node_seconds("day").values()))
        for counts in self._counted("day").values():
            found.failures += counts.failures
            found.lost_gpu_s += counts.lost_gpu_s
        return found

    def interruptions(self, total: _Counts) -> Rate:
        rows = self._visible(Failure.objects.filter(day__gte=self.since, is_interruption=True))
        return Rate(rows.count(), total.node_s / DAY_S)

    def rows(self, total: _Counts, medians: Medians) -> list[FailureRow]:
        by = self.filters.by
        if by == "cause":
            return self._causes(total, medians)
        if by == "week":
            return self.weeks()
        return {"node": self.nodes, "rack": self._racks, "partition": self._partitions, "project": self._by_project}[
            by
        ]()

    def _causes(self, total: _Counts, medians: Medians) -> list[FailureRow]:
        rows = []
        for cause, counts in self._counted("cause").items():
            counts = replace(counts, node_s=total.node_s)
            described = CAUSES.get(cause)
            detect, recover = medians.get(cause, (None, None))
            title = described.title if described else ""
            rows.append(counts.row(cause or NOT_DIAGNOSED, detect_s=detect, recover_s=recover, title=title))
        return sorted(rows, key=lambda row: (-row.rate.failures, row.name))

    def nodes(self) -> list[FailureRow]:
        rows = [counts.row(name or NO_NODE, link=_node_link(name)) for name, counts in self._by_node().items()]
        return _worst_first(rows)

    def _racks(self) -> list[FailureRow]:
        racks = dict(RackPlace.objects.values_list("node", "rack"))
        found: dict[str, _Counts] = defaultdict(_Counts)
        for node, counts in self._by_node().items():
            name = racks.get(node, NO_RACK) if node else NO_NODE
            found[name].failures += counts.failures
            found[name].node_s += counts.node_s
            found[name].lost_gpu_s += counts.lost_gpu_s
        return _worst_first([counts.row(name) for name, counts in found.items()])

    def _partitions(self) -> list[FailureRow]:
        found = self._counts_by("partition")
        return _worst_first([counts.row(name or NO_PARTITION) for name, counts in found.items()])

    def _by_project(self) -> list[FailureRow]:
        found = self._counts_by("project")
        names = dict(Project.objects.filter(pk__in=list(found)).values_list("pk", "slug"))
        visible = set(Project.objects.visible_to(self.user).values_list("pk", flat=True))
        rows = [
            counts.row(names[pk], link=f"{reverse('jobs')}?project={names[pk]}" if pk in visible else "")
            for pk, counts in found.items()
            if pk in names
        ]
        return _worst_first(rows)

    def weeks(self) -> list[FailureRow]:
        by_day = self._counts_by("day")
        by_week: dict[date, _Counts] = defaultdict(_Counts)
        week_of = monday(self.since)
        while week_of <= self.now.astimezone(UTC).date():
            by_week[week_of] = _Counts()
            week_of += timedelta(days=7)
        for day, counts in by_day.items():
            week = by_week[monday(day)]
            week.failures += counts.failures
            week.node_s += counts.node_s
            week.lost_gpu_s += counts.lost_gpu_s
        rows = [counts.row(day.isoformat(), since=day) for day, counts in sorted(by_week.items())]
        return list(dropwhile(lambda row: not (row.rate.failures or row.rate.node_days), rows))

    def effective(self) -> float | None:
        rows = self._visible(ProjectHeld.objects.filter(rows_since(self.since)))
        sums = rows.aggregate(kept=Sum("jobs_kept_s"), held=Sum("jobs_held_s"), queued=Sum("jobs_queued_s"))
        whole = (sums["held"] or 0.0) + (sums["queued"] or 0.0)
        return min(1.0, max(0.0, sums["kept"] / whole)) if whole > SOME_S else None

    def offenders(self) -> list[Offender]:
        """Return nodes that fail too often.

        Computed twice, since the number of programs is only queried for candidates.
        """
        nodes = {name: counts for name, counts in self._by_node().items() if name}
        programs = self._programs([offender.counts.node for offender in self._offenders_among(nodes, {})])
        return self._offenders_among(nodes, programs)

    def _offenders_among(self, nodes: dict[str, _Counts], programs: dict[str, int]) -> list[Offender]:
        return offenders(
            NodeFailures(name, counts.failures, programs.get(name, counts.failures), counts.node_s / DAY_S)
            for name, counts in nodes.items()
        )

    def _programs(self, nodes: list[str]) -> dict[str, int]:
        found: dict[str, int] = {}
        for chunk in chunks(nodes):
            # Repeats the condition of the partial index, otherwise SQLite reads all failures of the window.
            rows = self.failures.filter(node__in=chunk).exclude(node="").order_by().values_list("node")
            found |= dict(rows.annotate(Count("program", distinct=True)))
        return found

    def medians(self) -> Medians:
        """Return median seconds to detect and to recover by cause, and over all causes under None."""
        rows = self.failures.order_by("-day").values_list("cause", "detect_s", "recover_s")[:MAX_TIMES]
        detect: dict[str | None, list[float]] = defaultdict(list)
        recover: dict[str | None, list[float]] = defaultdict(list)
        for cause, detected, recovered in rows:
            for key in (cause, None):
                if detected is not None:
                    detect[key].append(detected)
                if recovered is not None:
                    recover[key].append(recovered)
        return {key: (_median(detect[key]), _median(recover[key])) for key in {*detect, *recover}}

    def _counted(self, name: str) -> dict[Any, _Counts]:
        found: dict[Any, _Counts] = self._cached("failures", name, self._count)
        return found

    def _node_seconds(self, name: str) -> dict[Any, float]:
        found: dict[Any, float] = self._cached("held", name, self._read_node_seconds)
        return found

    def _by_node(self) -> dict[str, _Counts]:
        return _with_node_seconds(self._counted("node"), self._cached("held", "node", self._read_node_seconds_by_node))

    def _counts_by(self, name: str) -> dict[Any, _Counts]:
        return _with_node_seconds(self._counted(name), self._node_seconds(name))

    def _cached(self, what: str, name: str, read: Callable[[str], Any]) -> Any:
        if (what, name) not in self._cache:
            self._cache[what, name] = read(name)
        return self._cache[what, name]

    def _count(self, name: str) -> dict[Any, _Counts]:
        rows = self.failures.order_by().values_list(name).annotate(Count("pk"), Sum("lost_gpu_s"))
        return {key: _Counts(number, 0.0, lost or 0.0) for key, number, lost in rows}

    def _read_node_seconds(self, name: str) -> dict[Any, float]:
        """Return allocated node seconds by the values of a column. Whole weeks have the day of their Monday."""
        rows = self._visible(ProjectHeld.objects.filter(rows_since(self.since)))
        node_seconds: dict[Any, float] = defaultdict(float, rows.order_by().values_list(name).annotate(Sum("node_s")))
        for allocation in self.live:
            nodes = max(1, len(allocation.nodes))
            if name == "day":
                for day, seconds in allocation.days(self.since):
                    node_seconds[day] += seconds * nodes
            else:
                node_seconds[getattr(allocation, name)] += allocation.seconds(self.since) * nodes
        return node_seconds

    def _read_node_seconds_by_node(self, name: str) -> dict[str, float]:
        model = NodeHeld if self.projects is None else ProjectNodeHeld
        rows = self._visible(model.objects.filter(rows_since(self.since)))
        found: dict[str, float] = defaultdict(float, rows.order_by().values_list(name).annotate(Sum("node_s")))
        for allocation in self.live:
            seconds = allocation.seconds(self.since)
            for node in allocation.nodes:
                found[node] += seconds
        return found


def _with_node_seconds(counted: dict[Any, _Counts], node_seconds: dict[Any, float]) -> dict[Any, _Counts]:
    found = {key: replace(counts, node_s=node_seconds.get(key, 0.0)) for key, counts in counted.items()}
    return found | {key: _Counts(0, node_s) for key, node_s in node_seconds.items() if key not in counted}


def _projects(user: User, slug: str) -> set[int] | None:
    """Return the ids of the projects whose numbers this person may see; None for all."""
    if sees_all(user):
        return set(Project.objects.filter(slug=slug).values_list("pk", flat=True)) if slug else None
    member_of = Project.objects.filter(memberships__user=user)
    return set((member_of.filter(slug=slug) if slug else member_of).values_list("pk", flat=True))


def _worst_first(rows: list[FailureRow]) -> list[FailureRow]:
    return sorted(rows, key=lambda row: (-row.rate.failures, -row.rate.per_day, row.name))


def _median(values: list[float]) -> float | None:
    return float(np.median(values)) if values else None


def _node_link(name: str) -> str:
    return reverse("node", args=[name]) if name and "/" not in name else ""
