"""Report GPU-hours allocated, used and idle by project, person or job, as far as a person may see them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

from django.db.models import F, Q, Sum
from django.db.models.functions import NullIf
from django.urls import reverse

from jobs.listing.telemetry_access import visible_holdings
from jobs.models import Attempt, GpuHours, Job, JobHours
from jobs.waste.notices import IdleJob, idle_jobs
from nodes.models import GpuUse
from portal.access import sees_all
from portal.bulk import chunks
from portal.models import Project, User

HOUR_S = 3600
WINDOWS = (1, 7, 30, 90)
GROUPINGS = ("project", "person", "job")
SORTS = ("name", "allocated", "used", "share", "idle")
FORMER_SORTS = ("held", "-held")  # deprecated names of "allocated" and "-allocated"
MAX_DAYS = 90
OUTSIDE_VIGIL = "outside Vigil"  # jobs of unknown projects


@dataclass(frozen=True)
class AllocatedHours:
    """Allocated GPU-hours. `used` weighs each second by utilisation; `idle` had no activity at all."""

    allocated: float = 0.0
    used: float = 0.0
    idle: float = 0.0

    @property
    def share(self) -> float | None:
        """Return the share of the allocated hours that was used."""
        return min(1.0, self.used / self.allocated) if self.allocated else None

    def __add__(self, other: AllocatedHours) -> AllocatedHours:
        return AllocatedHours(self.allocated + other.allocated, self.used + other.used, self.idle + other.idle)


@dataclass(frozen=True)
class WasteEntry:
    """The GPU use of one project, person or job."""

    name: str
    hours: AllocatedHours
    link: str = ""
    _: KW_ONLY
    project: str = ""
    person: str = ""
    job: int | None = None
    scheduler_id: str = ""


@dataclass(frozen=True, kw_only=True)
class WasteFilter:
    """The filters of the report. `sort` is one of SORTS; a leading minus puts the largest first."""

    days: int = 7
    by: str = "project"
    sort: str = "-idle"

    @property
    def key(self) -> str:
        return self.sort.removeprefix("-")

    @property
    def is_falling(self) -> bool:
        return self.sort.startswith("-")

    def since(self, now: datetime) -> date:
        """Return the first day; the last one is today in UTC."""
        return now.astimezone(UTC).date() - timedelta(days=self.days - 1)


@dataclass(frozen=True)
class WasteReport:
    """A page of rows, and the total over all rows."""

    rows: list[WasteEntry]
    total: AllocatedHours
    most: WasteEntry | None  # whose idle hours are the most
    is_last: bool


def current_sort(sort: str) -> str:
    """Return the present name of an order; requests may still use the former ones."""
    return sort.replace("held", "allocated") if sort in FORMER_SORTS else sort


def find(user: User, filters: WasteFilter, now: datetime, *, limit: int, skip: int = 0) -> WasteReport:
    """Return the rows from `skip` on. Daily sums are used, except for jobs, which are summed at each request."""
    since = filters.since(now)
    groups = _groups(user, since)
    total = sum((hours for _, _, _, hours in groups), AllocatedHours())
    by_person = _by_person(groups)
    if filters.by == "job":
        rows, is_last = _jobs(user, filters, since, limit, skip)
        return WasteReport(rows, total, _idlest(by_person), is_last)
    rows = _sorted(by_person if filters.by == "person" else _by_project(user, groups), filters)
    page = rows[skip : skip + limit]
    return WasteReport(page, total, _idlest(rows), skip + limit >= len(rows))


def idle_now(user: User, now: datetime) -> list[tuple[IdleJob, bool]]:
    """Return the jobs with idle GPUs that this person may see, longest idle first.

    The second value of each says whether they may open the job's page.
    """
    idle = idle_jobs(now)
    visible = set(_visible_jobs(user, [job.attempt.job_id for job in idle if job.attempt]))
    return [
        (job, job.attempt is None or job.attempt.job_id in visible)
        for job in idle
        if sees_all(user) or job.owner == user or (job.attempt is not None and job.attempt.job_id in visible)
    ]


_Group = tuple[int | None, int | None, str, AllocatedHours]


def _groups(user: User, since: date) -> list[_Group]:
    """Return (project, person, Slurm user if not a person of this site, hours)."""
    rows = _visible(user, GpuHours.objects.filter(day__gte=since)).order_by()
    sums = rows.values_list("project", "person", "user").annotate(Sum("held_s"), Sum("used_s"), Sum("idle_s"))
    return [(project, person, name, _hours(*seconds)) for project, person, name, *seconds in sums]


def _visible(user: User, rows: Any) -> Any:
    """Filter rows to a person's own and their projects', unless the site shows everybody's."""
    if sees_all(user):
        return rows
    condition = Q(person=user) | Q(project__in=user.memberships.values("project"))
    return rows.filter(condition | Q(person=None, user=user.slurm_user) if user.slurm_user else condition)


def _by_project(user: User, groups: Iterable[_Group]) -> list[WasteEntry]:
    found = _grouped(groups, lambda group: group[0])
    names = dict(Project.objects.filter(pk__in=[project for project in found if project]).values_list("pk", "slug"))
    visible = set(Project.objects.visible_to(user).values_list("pk", flat=True))
    rows = []
    for project, hours in found.items():
        name = names.get(project, OUTSIDE_VIGIL)
        link = f"{reverse('jobs')}?project={name}" if project in visible else ""
        rows.append(WasteEntry(name, hours, link, project=name if project in names else ""))
    return rows


def _by_person(groups: Iterable[_Group]) -> list[WasteEntry]:
    """Return one row per person, with the hours from before their Slurm user was set here."""
    groups = list(groups)
    names = _DisplayNames([(person, user) for _, person, user, _ in groups])
    found = _grouped(groups, lambda group: names.name(group[1], group[2]))
    return [WasteEntry(name or "unknown", hours, person=name or "unknown") for name, hours in found.items()]


class _DisplayNames:
    """The display names of people with allocated GPUs: people of this site, else users of the scheduler."""

    def __init__(self, rows: Sequence[tuple[int | None, str]]) -> None:
        """Look up the names; `rows` are (person or None, the scheduler's user)."""
        users = {user for person, user in rows if person is None and user}
        people = User.objects.filter(Q(pk__in={person for person, _ in rows if person}) | Q(slurm_user__in=users))
        names = list(people.values_list("pk", "username", "slurm_user"))
        self._by_id = {pk: username for pk, username, _ in names}
        self._by_slurm_user = {slurm_user: username for _, username, slurm_user in names if slurm_user in users}
        self._namesakes = set(User.objects.filter(username__in=users).values_list("username", flat=True))

    def name(self, person: int | None, user: str) -> str:
        """Return the name; "" if unknown. A Slurm user with the same name as a person here is marked as such."""
        if (name := self._by_id.get(person or 0) or self._by_slurm_user.get(user)) is not None:
            return name
        return f"{user} (Slurm user)" if user in self._namesakes else user


def _grouped(groups: Iterable[_Group], key: Callable[[_Group], Any]) -> dict[Any, AllocatedHours]:
    found: dict[Any, AllocatedHours] = {}
    for group in groups:
        found[key(group)] = found.get(key(group), AllocatedHours()) + group[3]
    return found


def _jobs(user: User, filters: WasteFilter, since: date, limit: int, skip: int) -> tuple[list[WasteEntry], bool]:
    """Return jobs that began in these days, by their sums, and the few that began earlier, whose days are added up."""
    order = _ORDERS[filters.key]
    begun = _visible(user, JobHours.objects.filter(first_day__gte=since)).annotate(place=order)
    place = F("place").desc(nulls_last=True) if filters.is_falling else F("place").asc(nulls_last=True)
    # Keys first, from a covering index: SQLite would otherwise sort whole rows.
    first = list(begun.order_by(place, "pk").values_list("pk", flat=True)[: skip + limit + 1])
    hours = [*JobHours.objects.in_bulk(first).values(), *_older(user, since)]
    hours.sort(key=lambda row: row.pk)
    hours.sort(key=lambda row: _sort_value(row, filters), reverse=filters.is_falling)
    return _job_rows(user, hours[skip : skip + limit]), len(hours) <= skip + limit


_ORDERS = {
    "allocated": F("held_s"),
    "used": F("used_s"),
    "idle": F("idle_s"),
    "share": F("used_s") / NullIf(F("held_s"), 0.0),
    "name": F("job"),  # by id: names are not stored with hours
}


def _sort_value(row: JobHours, filters: WasteFilter) -> float:
    """Return the value to sort by; rows without one come last in either direction."""
    values = {"allocated": row.held_s, "used": row.used_s, "idle": row.idle_s, "name": row.job}
    value = (row.used_s / row.held_s if row.held_s else None) if filters.key == "share" else values[filters.key]
    return value if value is not None else (-math.inf if filters.is_falling else math.inf)


def _older(user: User, since: date) -> list[JobHours]:
    """Return jobs that began before these days and continued into them, with only what they did in these days."""
    many_days = JobHours.objects.filter(last_day__gt=F("first_day"), last_day__gte=since, first_day__lt=since)
    rows = {(row.job, "" if row.job else row.scheduler_id): row for row in _visible(user, many_days)}
    attempts = Attempt.objects.filter(job__in=[job for job, _ in rows if job]).exclude(scheduler_id="")
    ids = {row.scheduler_id for row in rows.values()} | set(attempts.values_list("scheduler_id", flat=True))
    sums = _days_of(sorted(ids), since)
    for key, row in rows.items():
        row.held_s, row.used_s, row.idle_s = sums.get(key, (0.0, 0.0, 0.0))
    return [row for row in rows.values() if row.held_s]


def _days_of(ids: Sequence[str], since: date) -> dict[tuple[int | None, str], tuple[float, float, float]]:
    """Return (held, used, idle) seconds by Vigil's job number, else by the scheduler's id."""
    totals: dict[tuple[int | None, str], tuple[float, float, float]] = {}
    for chunk in chunks(ids):
        days = GpuUse.objects.filter(scheduler_id__in=chunk, day__gte=since).order_by()
        sums = days.values_list("scheduler_id", "job").annotate(Sum("held_s"), Sum("used_s"), Sum("idle_s"))
        for scheduler_id, job, allocated, used, idle in sums:
            key = (job, "" if job else scheduler_id)
            before = totals.get(key, (0.0, 0.0, 0.0))
            totals[key] = (before[0] + allocated, before[1] + used, before[2] + idle)
    return totals


def _job_rows(user: User, found: Sequence[JobHours]) -> list[WasteEntry]:
    jobs = _visible_jobs(user, [hours.job for hours in found if hours.job])
    projects = dict(Project.objects.filter(pk__in=[hours.project_id for hours in found]).values_list("pk", "slug"))
    names = _DisplayNames([(hours.person_id, hours.user) for hours in found])
    holdings = visible_holdings(user).filter(scheduler_id__in=[hours.scheduler_id for hours in found]).order_by("pk")
    by_id = {row[0]: row for row in holdings.values_list("scheduler_id", "name", "agent__node")}
    rows = []
    for hours in found:
        job = jobs.get(hours.job or 0)
        _, name, node = by_id.get(hours.scheduler_id, ("", "", ""))
        link = reverse("job", args=[job.pk]) if job else reverse("node", args=[node]) if node else ""
        rows.append(
            WasteEntry(
                (job.name if job else name) or f"job {hours.scheduler_id}",
                _hours(hours.held_s, hours.used_s, hours.idle_s),
                link,
                project=projects.get(hours.project_id or 0, ""),
                person=names.name(hours.person_id, hours.user),
                job=job.pk if job else None,
                scheduler_id=hours.scheduler_id,
            )
        )
    return rows


def _visible_jobs(user: User, numbers: Iterable[int]) -> dict[int, Job]:
    rows = Job.objects.visible_to(user).filter(pk__in=list(numbers))
    return {job.pk: job for job in rows.only("name", "project")}


def _sorted(rows: list[WasteEntry], filters: WasteFilter) -> list[WasteEntry]:
    rows = sorted(rows, key=lambda row: row.name)
    if filters.key == "name":
        return rows[::-1] if filters.is_falling else rows
    return sorted(rows, key=lambda row: getattr(row.hours, filters.key) or 0.0, reverse=filters.is_falling)


def _idlest(rows: Iterable[WasteEntry]) -> WasteEntry | None:
    return max(rows, key=lambda row: row.hours.idle, default=None)


def _hours(allocated: float, used: float, idle: float) -> AllocatedHours:
    return AllocatedHours(allocated / HOUR_S, used / HOUR_S, idle / HOUR_S)
