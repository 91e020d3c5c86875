"""GPU-hours held, used and idle over the last days, by project, person or job, as far as a person may see them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Any

from django.db.models import F, Q, Sum
from django.db.models.functions import NullIf
from django.urls import reverse

from jobs.listing.sight import sees_all, visible_holdings
from jobs.models import Attempt, GpuHours, Job, JobHours
from jobs.waste.telling import IdleJob, idle_jobs
from nodes.models import GpuUse
from portal.models import Project, User

HOUR_S = 3600
WINDOWS = (1, 7, 30, 90)
BY = ("project", "person", "job")
SORTS = ("name", "held", "used", "share", "idle")
MOST_DAYS = 90
OUTSIDE_VIGIL = "outside Vigil"  # jobs that no project here knows


@dataclass(frozen=True)
class Hours:
    """GPU-hours: `used` weighs each second by the utilisation, `idle` are seconds in which nothing was done at all."""

    held: float = 0.0
    used: float = 0.0
    idle: float = 0.0

    @property
    def share(self) -> float | None:
        """How much of what was held was used."""
        return min(1.0, self.used / self.held) if self.held else None

    def __add__(self, other: Hours) -> Hours:
        return Hours(self.held + other.held, self.used + other.used, self.idle + other.idle)


@dataclass(frozen=True)
class Row:
    """What one project's, person's or job's GPUs did."""

    name: str
    hours: Hours
    link: str = ""
    project: str = ""
    person: str = ""
    job: int | None = None
    scheduler_id: str = ""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is asked for. `sort`: one of SORTS, after a minus the largest first."""

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
        """The first of the days: today, as UTC has it, is the last."""
        return now.astimezone(UTC).date() - timedelta(days=self.days - 1)


@dataclass(frozen=True)
class Found:
    """A page of rows, and what all there are add up to."""

    rows: list[Row]
    total: Hours
    most: Row | None  # whose idle hours are the most
    is_last: bool


def find(user: User, wanted: Wanted, now: datetime, *, limit: int, skip: int = 0) -> Found:
    """The rows from `skip` on. Sums by day answer but for jobs, which are added up anew."""
    since = wanted.since(now)
    groups = _groups(user, since)
    total = sum((hours for _, _, _, hours in groups), Hours())
    by_person = _by_person(groups)
    if wanted.by == "job":
        rows, is_last = _jobs(user, wanted, since, limit, skip)
        return Found(rows, total, _idlest(by_person), is_last)
    rows = _sorted(by_person if wanted.by == "person" else _by_project(user, groups), wanted)
    page = rows[skip : skip + limit]
    return Found(page, total, _idlest(rows), skip + limit >= len(rows))


def idle_now(user: User, now: datetime) -> list[tuple[IdleJob, bool]]:
    """Jobs that hold idle GPUs now and that this person may know of, the longest idle first; and whether they may look
    at its page."""
    found = idle_jobs(now)
    own = set(_visible_jobs(user, [job.attempt.job_id for job in found if job.attempt]))
    return [
        (job, job.attempt is None or job.attempt.job_id in own)
        for job in found
        if sees_all(user) or job.owner == user or (job.attempt is not None and job.attempt.job_id in own)
    ]


_Group = tuple[int | None, int | None, str, Hours]


def _groups(user: User, since: date) -> list[_Group]:
    """(project, person, the scheduler's user where it is no person of ours, hours)."""
    rows = _seen(user, GpuHours.objects.filter(day__gte=since)).order_by()
    sums = rows.values_list("project", "person", "user").annotate(Sum("held_s"), Sum("used_s"), Sum("idle_s"))
    return [(project, person, name, _hours(*told)) for project, person, name, *told in sums]


def _seen(user: User, rows: Any) -> Any:
    """Those of a person's own, of their projects, or everybody's where the site shows them."""
    if sees_all(user):
        return rows
    own = Q(person=user) | Q(project__in=user.memberships.values("project"))
    return rows.filter(own | Q(person=None, user=user.slurm_user) if user.slurm_user else own)


def _by_project(user: User, groups: Iterable[_Group]) -> list[Row]:
    found = _together(groups, lambda group: group[0])
    names = dict(Project.objects.filter(pk__in=[one for one in found if one]).values_list("pk", "slug"))
    own = set(Project.objects.visible_to(user).values_list("pk", flat=True))
    rows = []
    for project, hours in found.items():
        name = names.get(project, OUTSIDE_VIGIL)
        link = f"{reverse('jobs')}?project={name}" if project in own else ""
        rows.append(Row(name, hours, link, project=name if project in names else ""))
    return rows


def _by_person(groups: Iterable[_Group]) -> list[Row]:
    """Return one row per person, with the hours from before their Slurm user was set here."""
    groups = list(groups)
    owners = _Owners([(person, user) for _, person, user, _ in groups])
    found = _together(groups, lambda group: owners.name(group[1], group[2]))
    return [Row(name or "unknown", hours, person=name or "unknown") for name, hours in found.items()]


class _Owners:
    """Names of those who held GPUs: people of this site, else users of the scheduler."""

    def __init__(self, rows: Sequence[tuple[int | None, str]]) -> None:
        """`rows`: of each the person, or None and the scheduler's user."""
        users = {user for person, user in rows if person is None and user}
        people = User.objects.filter(Q(pk__in={person for person, _ in rows if person}) | Q(slurm_user__in=users))
        told = list(people.values_list("pk", "username", "slurm_user"))
        self._by_id = {pk: username for pk, username, _ in told}
        self._by_slurm_user = {slurm_user: username for _, username, slurm_user in told if slurm_user in users}
        self._namesakes = set(User.objects.filter(username__in=users).values_list("username", flat=True))

    def name(self, person: int | None, user: str) -> str:
        """A user of the scheduler's is told apart from a person who is called the same; "" where nobody is known."""
        if (name := self._by_id.get(person or 0) or self._by_slurm_user.get(user)) is not None:
            return name
        return f"{user} (Slurm user)" if user in self._namesakes else user


def _together(groups: Iterable[_Group], key: Callable[[_Group], Any]) -> dict[Any, Hours]:
    found: dict[Any, Hours] = {}
    for group in groups:
        found[key(group)] = found.get(key(group), Hours()) + group[3]
    return found


def _jobs(user: User, wanted: Wanted, since: date, limit: int, skip: int) -> tuple[list[Row], bool]:
    """Jobs that began in these days, by their sums; and the few that began before, whose days are added up."""
    order = _ORDERS[wanted.key]
    begun = _seen(user, JobHours.objects.filter(first_day__gte=since)).annotate(place=order)
    place = F("place").desc(nulls_last=True) if wanted.is_falling else F("place").asc(nulls_last=True)
    # Their keys first, by an index that has all that orders ask for: SQLite would sort whole rows.
    first = list(begun.order_by(place, "pk").values_list("pk", flat=True)[: skip + limit + 1])
    found = [*JobHours.objects.in_bulk(first).values(), *_older(user, since)]
    found.sort(key=lambda one: one.pk)
    found.sort(key=lambda one: _place(one, wanted), reverse=wanted.is_falling)
    return _job_rows(user, found[skip : skip + limit]), len(found) <= skip + limit


_ORDERS = {
    "held": F("held_s"),
    "used": F("used_s"),
    "idle": F("idle_s"),
    "share": F("used_s") / NullIf(F("held_s"), 0.0),
    "name": F("job"),  # by its number: names are not kept beside hours
}


def _place(one: JobHours, wanted: Wanted) -> float:
    """What it is put in order by; what has none stands last, either way round."""
    values = {"held": one.held_s, "used": one.used_s, "idle": one.idle_s, "name": one.job}
    value = (one.used_s / one.held_s if one.held_s else None) if wanted.key == "share" else values[wanted.key]
    return value if value is not None else (-math.inf if wanted.is_falling else math.inf)


def _older(user: User, since: date) -> list[JobHours]:
    """Jobs that began before these days and went on in them, with what they did in these days alone."""
    many_days = JobHours.objects.filter(last_day__gt=F("first_day"), last_day__gte=since, first_day__lt=since)
    rows = {(one.job, "" if one.job else one.scheduler_id): one for one in _seen(user, many_days)}
    attempts = Attempt.objects.filter(job__in=[job for job, _ in rows if job]).exclude(scheduler_id="")
    ids = {one.scheduler_id for one in rows.values()} | set(attempts.values_list("scheduler_id", flat=True))
    sums = _days_of(sorted(ids), since)
    for key, one in rows.items():
        one.held_s, one.used_s, one.idle_s = sums.get(key, (0.0, 0.0, 0.0))
    return [one for one in rows.values() if one.held_s]


def _days_of(ids: Sequence[str], since: date) -> dict[tuple[int | None, str], tuple[float, float, float]]:
    """What jobs did since, in seconds: by Vigil's number of each, else by the scheduler's."""
    found: dict[tuple[int | None, str], tuple[float, float, float]] = {}
    for at in range(0, len(ids), 500):
        days = GpuUse.objects.filter(scheduler_id__in=ids[at : at + 500], day__gte=since).order_by()
        sums = days.values_list("scheduler_id", "job").annotate(Sum("held_s"), Sum("used_s"), Sum("idle_s"))
        for scheduler_id, job, held, used, idle in sums:
            key = (job, "" if job else scheduler_id)
            before = found.get(key, (0.0, 0.0, 0.0))
            found[key] = (before[0] + held, before[1] + used, before[2] + idle)
    return found


def _job_rows(user: User, found: Sequence[JobHours]) -> list[Row]:
    jobs = _visible_jobs(user, [one.job for one in found if one.job])
    projects = dict(Project.objects.filter(pk__in=[one.project_id for one in found]).values_list("pk", "slug"))
    owners = _Owners([(one.person_id, one.user) for one in found])
    held = visible_holdings(user).filter(scheduler_id__in=[one.scheduler_id for one in found]).order_by("pk")
    told = {row[0]: row for row in held.values_list("scheduler_id", "name", "agent__node")}
    rows = []
    for one in found:
        job = jobs.get(one.job or 0)
        _, name, node = told.get(one.scheduler_id, ("", "", ""))
        link = reverse("job", args=[job.pk]) if job else reverse("node", args=[node]) if node else ""
        rows.append(
            Row(
                (job.name if job else name) or f"job {one.scheduler_id}",
                _hours(one.held_s, one.used_s, one.idle_s),
                link,
                projects.get(one.project_id or 0, ""),
                owners.name(one.person_id, one.user),
                job.pk if job else None,
                one.scheduler_id,
            )
        )
    return rows


def _visible_jobs(user: User, numbers: Iterable[int]) -> dict[int, Job]:
    rows = Job.objects.visible_to(user).filter(pk__in=list(numbers))
    return {job.pk: job for job in rows.only("name", "project")}


def _sorted(rows: list[Row], wanted: Wanted) -> list[Row]:
    rows = sorted(rows, key=lambda row: row.name)
    if wanted.key == "name":
        return rows[::-1] if wanted.is_falling else rows
    return sorted(rows, key=lambda row: getattr(row.hours, wanted.key) or 0.0, reverse=wanted.is_falling)


def _idlest(rows: Iterable[Row]) -> Row | None:
    return max(rows, key=lambda row: row.hours.idle, default=None)


def _hours(held: float, used: float, idle: float) -> Hours:
    return Hours(held / HOUR_S, used / HOUR_S, idle / HOUR_S)
