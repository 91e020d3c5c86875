"""What failed over the last days, by cause, node, rack, partition, project or week, as far as a person may see it.

Held time comes from sums of days, and of what they lack yet from the attempts themselves; failures are counted as they
stand. Where the site shows everybody's jobs, numbers are everybody's; else they are of a person's own projects.
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
from jobs.failures.counted import causes_of
from jobs.listing.sight import sees_all
from jobs.models import Failure, NodeHeld, ProjectHeld, ProjectNodeHeld
from jobs.reliability.held import monday, uncounted
from jobs.reliability.held import since as held_since
from jobs.reliability.offenders import Offender, Seen, offenders
from jobs.reliability.rate import Rate
from nodes.models import RackPlace
from portal.models import Project, User

DAY_S, HOUR_S = 86_400.0, 3_600.0
WINDOWS = (7, 30, 90, 365)
BY = ("cause", "node", "rack", "partition", "project", "week")
MOST_TIMES = 3_000  # of the newest failures, whose medians are taken
SOME_S = 1.0  # sums of what is added and taken out again are not quite 0
NO_NODE, NO_RACK, NO_PARTITION = "on several nodes", "in no rack", "none named"
NOT_DIAGNOSED = "not diagnosed"


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is asked for. `kind`: all failures, or those of machines or programs alone; `project`: a short name."""

    days: int = 30
    by: str = "cause"
    kind: str = "all"
    project: str = ""

    def since(self, now: datetime) -> date:
        """The first of the days: today, as UTC has it, is the last."""
        return now.astimezone(UTC).date() - timedelta(days=self.days - 1)


@dataclass(frozen=True)
class Row:
    """Failures of one cause, node, rack, partition, project or week, over the node-days in which they could happen."""

    name: str
    rate: Rate
    lost_gpu_hours: float = 0.0
    detect_s: float | None = None
    recover_s: float | None = None
    link: str = ""
    title: str = ""
    since: date | None = None  # of a week


@dataclass(frozen=True)
class Found:
    """All of a window. `effective`: the part of queued and held time of jobs that have ended which is kept."""

    rows: list[Row]
    total: Row
    effective: float | None
    offenders: list[Offender]
    weeks: list[Row]
    interruptions: Rate
    """What may strike any run, or what one went on after: of whichever kind is asked for."""


@dataclass
class _Counts:
    failures: int = 0
    node_s: float = 0.0
    lost_gpu_s: float = 0.0

    def row(self, name: str, **more: Any) -> Row:
        return Row(name, Rate(self.failures, self.node_s / DAY_S), self.lost_gpu_s / HOUR_S, **more)


def find(user: User, wanted: Wanted, now: datetime) -> Found:
    asked = _Asked(user, wanted, now)
    total, medians = asked.total(), asked.medians()
    detect, recover = medians.get(None, (None, None))
    return Found(
        asked.rows(total, medians),
        total.row("all", detect_s=detect, recover_s=recover),
        asked.effective(),
        asked.offenders(),
        asked.weeks(),
        asked.interruptions(total),
    )


def interruptions(user: User, wanted: Wanted, now: datetime) -> tuple[Rate, float | None]:
    """How often a run is interrupted, and the median of the seconds until it trains again."""
    asked = _Asked(user, wanted, now)
    return asked.interruptions(asked.total()), asked.medians().get(None, (None, None))[1]


Medians = dict[str | None, tuple[float | None, float | None]]


class _Asked:
    """One look: what it asks more than once is kept."""

    def __init__(self, user: User, wanted: Wanted, now: datetime) -> None:
        self.user, self.wanted, self.now = user, wanted, now
        self.since = wanted.since(now)
        self.projects = _projects(user, wanted.project)
        """Whose numbers count; None: everybody's."""
        self.live = [one for one in uncounted(now) if self.projects is None or one.project in self.projects]
        causes = causes_of(wanted.kind)
        failures = Failure.objects.filter(day__gte=self.since, **({} if causes is None else {"cause__in": causes}))
        self.failures = self._mine(failures)
        self._kept: dict[tuple[str, str], Any] = {}

    def _mine(self, rows: Any) -> Any:
        return rows if self.projects is None else rows.filter(project__in=self.projects)

    def total(self) -> _Counts:
        found = _Counts(0, sum(self._held("day").values()))
        for one in self._counted("day").values():
            found.failures += one.failures
            found.lost_gpu_s += one.lost_gpu_s
        return found

    def interruptions(self, total: _Counts) -> Rate:
        rows = self._mine(Failure.objects.filter(day__gte=self.since, is_interruption=True))
        return Rate(rows.count(), total.node_s / DAY_S)

    def rows(self, total: _Counts, medians: Medians) -> list[Row]:
        by = self.wanted.by
        if by == "cause":
            return self._causes(total, medians)
        if by == "week":
            return self.weeks()
        return {"node": self.nodes, "rack": self._racks, "partition": self._partitions, "project": self._by_project}[
            by
        ]()

    def _causes(self, total: _Counts, medians: Medians) -> list[Row]:
        rows = []
        for cause, counts in self._counted("cause").items():
            counts = replace(counts, node_s=total.node_s)
            known = CAUSES.get(cause)
            detect, recover = medians.get(cause, (None, None))
            title = known.title if known else ""
            rows.append(counts.row(cause or NOT_DIAGNOSED, detect_s=detect, recover_s=recover, title=title))
        return sorted(rows, key=lambda row: (-row.rate.failures, row.name))

    def nodes(self) -> list[Row]:
        rows = [counts.row(name or NO_NODE, link=_of_node(name)) for name, counts in self._by_node().items()]
        return _worst_first(rows)

    def _racks(self) -> list[Row]:
        racks = dict(RackPlace.objects.values_list("node", "rack"))
        found: dict[str, _Counts] = defaultdict(_Counts)
        for node, counts in self._by_node().items():
            name = racks.get(node, NO_RACK) if node else NO_NODE
            found[name].failures += counts.failures
            found[name].node_s += counts.node_s
            found[name].lost_gpu_s += counts.lost_gpu_s
        return _worst_first([counts.row(name) for name, counts in found.items()])

    def _partitions(self) -> list[Row]:
        found = self._together("partition")
        return _worst_first([counts.row(name or NO_PARTITION) for name, counts in found.items()])

    def _by_project(self) -> list[Row]:
        found = self._together("project")
        names = dict(Project.objects.filter(pk__in=list(found)).values_list("pk", "slug"))
        own = set(Project.objects.visible_to(self.user).values_list("pk", flat=True))
        rows = [
            counts.row(names[pk], link=f"{reverse('jobs')}?project={names[pk]}" if pk in own else "")
            for pk, counts in found.items()
            if pk in names
        ]
        return _worst_first(rows)

    def weeks(self) -> list[Row]:
        found = self._together("day")
        by_week: dict[date, _Counts] = defaultdict(_Counts)
        week_of = monday(self.since)
        while week_of <= self.now.astimezone(UTC).date():
            by_week[week_of] = _Counts()
            week_of += timedelta(days=7)
        for day, counts in found.items():
            week = by_week[monday(day)]
            week.failures += counts.failures
            week.node_s += counts.node_s
            week.lost_gpu_s += counts.lost_gpu_s
        rows = [counts.row(day.isoformat(), since=day) for day, counts in sorted(by_week.items())]
        return list(dropwhile(lambda row: not (row.rate.failures or row.rate.node_days), rows))

    def effective(self) -> float | None:
        rows = self._mine(ProjectHeld.objects.filter(held_since(self.since)))
        told = rows.aggregate(kept=Sum("jobs_kept_s"), held=Sum("jobs_held_s"), queued=Sum("jobs_queued_s"))
        whole = (told["held"] or 0.0) + (told["queued"] or 0.0)
        return min(1.0, max(0.0, told["kept"] / whole)) if whole > SOME_S else None

    def offenders(self) -> list[Offender]:
        """Who fails too often is asked after twice: how many programs it were is known of few."""
        nodes = {name: counts for name, counts in self._by_node().items() if name}
        programs = self._programs([one.seen.node for one in self._judged(nodes, {})])
        return self._judged(nodes, programs)

    def _judged(self, nodes: dict[str, _Counts], programs: dict[str, int]) -> list[Offender]:
        return offenders(
            Seen(name, one.failures, programs.get(name, one.failures), one.node_s / DAY_S)
            for name, one in nodes.items()
        )

    def _programs(self, nodes: list[str]) -> dict[str, int]:
        found: dict[str, int] = {}
        for at in range(0, len(nodes), 500):
            # Without the condition of its partial index SQLite would read all failures of the window.
            rows = self.failures.filter(node__in=nodes[at : at + 500]).exclude(node="").order_by().values_list("node")
            found |= dict(rows.annotate(Count("program", distinct=True)))
        return found

    def medians(self) -> Medians:
        """By cause, and of all under None: seconds to detect and to recover."""
        rows = self.failures.order_by("-day").values_list("cause", "detect_s", "recover_s")[:MOST_TIMES]
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
        found: dict[Any, _Counts] = self._once("failures", name, self._count)
        return found

    def _held(self, name: str) -> dict[Any, float]:
        found: dict[Any, float] = self._once("held", name, self._read_held)
        return found

    def _by_node(self) -> dict[str, _Counts]:
        return _with_held(self._counted("node"), self._once("held", "node", self._held_by_node))

    def _together(self, name: str) -> dict[Any, _Counts]:
        return _with_held(self._counted(name), self._held(name))

    def _once(self, what: str, name: str, ask: Callable[[str], Any]) -> Any:
        if (what, name) not in self._kept:
            self._kept[what, name] = ask(name)
        return self._kept[what, name]

    def _count(self, name: str) -> dict[Any, _Counts]:
        rows = self.failures.order_by().values_list(name).annotate(Count("pk"), Sum("lost_gpu_s"))
        return {key: _Counts(number, 0.0, lost or 0.0) for key, number, lost in rows}

    def _read_held(self, name: str) -> dict[Any, float]:
        """By the Monday of a week, where it is asked for by the day."""
        rows = self._mine(ProjectHeld.objects.filter(held_since(self.since)))
        found: dict[Any, float] = defaultdict(float, rows.order_by().values_list(name).annotate(Sum("node_s")))
        for one in self.live:
            nodes = max(1, len(one.nodes))
            if name == "day":
                for day, seconds in one.days(self.since):
                    found[day] += seconds * nodes
            else:
                found[getattr(one, name)] += one.seconds(self.since) * nodes
        return found

    def _held_by_node(self, name: str) -> dict[str, float]:
        model = NodeHeld if self.projects is None else ProjectNodeHeld
        rows = self._mine(model.objects.filter(held_since(self.since)))
        found: dict[str, float] = defaultdict(float, rows.order_by().values_list(name).annotate(Sum("node_s")))
        for one in self.live:
            seconds = one.seconds(self.since)
            for node in one.nodes:
                found[node] += seconds
        return found


def _with_held(counted: dict[Any, _Counts], held: dict[Any, float]) -> dict[Any, _Counts]:
    found = {key: replace(counts, node_s=held.get(key, 0.0)) for key, counts in counted.items()}
    return found | {key: _Counts(0, node_s) for key, node_s in held.items() if key not in counted}


def _projects(user: User, slug: str) -> set[int] | None:
    """The projects whose numbers this person may have; None: all, and none is asked for."""
    if sees_all(user):
        return set(Project.objects.filter(slug=slug).values_list("pk", flat=True)) if slug else None
    own = Project.objects.filter(memberships__user=user)
    return set((own.filter(slug=slug) if slug else own).values_list("pk", flat=True))


def _worst_first(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (-row.rate.failures, -row.rate.per_day, row.name))


def _median(values: list[float]) -> float | None:
    return float(np.median(values)) if values else None


def _of_node(name: str) -> str:
    return reverse("node", args=[name]) if name and "/" not in name else ""
