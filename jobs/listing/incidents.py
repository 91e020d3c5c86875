"""Search incidents, with the same filters for the page, the API and the command line.

A page is merged from index ranges, each in the list's order: of one node, of published incidents, of each project, of
each cause, or of all. Each index covers the other filters' columns, so that nothing else is read before the page's keys
are known; counts stop at a fixed number per range.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime
from heapq import merge
from itertools import islice

from django.db.models import F, Q, QuerySet

from diagnosis.causes import CAUSES
from jobs.models import Incident
from portal.http.paging import BadCursor, Page, SortOrder, decode, encode
from portal.models import Project, User

NEWEST = SortOrder("at", descending=True)
MAX_COUNTED = 10_000  # of each interval
MAX_STRETCHES = 40
OWNERS = ("researcher", "sysadmin", "both", "nobody")

_Place = tuple[datetime, int]


@dataclass(frozen=True, kw_only=True)
class IncidentSearch:
    """The filters of an incident search."""

    projects: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)  # any of them
    owner: str = ""  # who must act, by the cause
    node: str = ""
    is_published: bool | None = None
    since: datetime | None = None

    def page(self, user: User, *, cursor: str | None = None, limit: int = 50) -> Page[Incident]:
        """Return one page, newest first: its keys are read first, then its rows."""
        place = _place(cursor)
        after = Q() if place is None else Q(at__lte=place[0]) & (Q(at__lt=place[0]) | Q(pk__lt=place[1]))
        sorted_keys = [
            rows.filter(after).order_by("-at", "-id").values_list("at", "pk")[: limit + 1]
            for rows in self._stretches(user, self._causes)
        ]
        keys = list(islice(merge(*sorted_keys, reverse=True), limit + 1))
        rows = Incident.objects.with_people().in_bulk([pk for _, pk in keys[:limit]])
        items = [rows[pk] for _, pk in keys[:limit] if pk in rows]  # one may have been deleted in between
        if len(keys) <= limit or not items:
            return Page(items, None)
        return Page(items, encode(NEWEST, items[-1].at, items[-1].pk))

    def counts(self, user: User) -> IncidentCounts:
        """Return the number of incidents by cause, ignoring the filter on causes."""
        found: Counter[str] = Counter()
        is_cut = False
        for rows in self._stretches(user, []):
            some = rows.order_by("-at", "-id").values_list("cause", flat=True)[:MAX_COUNTED]
            counted = Counter(some)
            found.update(counted)
            is_cut = is_cut or counted.total() >= MAX_COUNTED
        return IncidentCounts(found, is_cut)

    @property
    def _causes(self) -> list[str]:
        """Return the requested causes, by name and by who must act; empty means all, including undiagnosed ones."""
        if not self.owner:
            return self.causes
        codes = [code for code, cause in CAUSES.items() if cause.owner == self.owner]
        return [code for code in codes if not self.causes or code in self.causes] or ["-"]

    def _stretches(self, user: User, causes: list[str]) -> list[QuerySet[Incident]]:
        """Split the search into disjoint queries, each a range of one index."""
        projects = _projects(user, self.projects)
        rows = Incident.objects.all()
        if self.since is not None:
            rows = rows.filter(at__gte=self.since)
        if self.is_published is not None:
            rows = rows.filter(published_at__isnull=not self.is_published)
        if self.node:
            rows = rows.filter(node=self.node)
        of_causes = Q(cause__in=causes) if causes else Q()
        if projects is not None and not self.node and not self.is_published and len(projects) <= MAX_STRETCHES:
            return [rows.filter(of_causes, project=pk) for pk in projects]
        if projects is not None:  # phrased so that no index on projects is used for it
            rows = rows.alias(project_key=F("project_id") + 0).filter(project_key__in=projects)
        if causes and not self.node and not self.is_published and len(causes) <= MAX_STRETCHES:
            return [rows.filter(cause=cause) for cause in causes]
        return [rows.filter(of_causes)]


@dataclass(frozen=True)
class IncidentCounts:
    """Incidents by cause; `is_cut` means that there are more than were counted."""

    by_cause: Counter[str]
    is_cut: bool

    @property
    def total(self) -> int:
        return sum(self.by_cause.values())


def _projects(user: User, slugs: list[str]) -> list[int] | None:
    """Return the ids of the projects to search; None for all."""
    if user.is_sysadmin and not slugs:
        return None
    visible = Project.objects.visible_to(user)
    return list((visible.filter(slug__in=slugs) if slugs else visible).order_by().values_list("pk", flat=True))


def _place(cursor: str | None) -> _Place | None:
    if not cursor:
        return None
    value, pk = decode(cursor, NEWEST)
    if not isinstance(value, datetime):
        raise BadCursor
    return value, pk
