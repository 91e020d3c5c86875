"""Search jobs, with the same filters and orders for the page, the API and the command line."""

from collections import defaultdict
from datetime import UTC, datetime
from typing import Any

from django.db import connection

from jobs.listing.criteria import JobCriteria
from jobs.listing.filters import resolve
from jobs.listing.finder import Finder, Place
from jobs.models import Job, Tag
from portal.http.paging import BadCursor, Page, SortOrder, decode, encode
from portal.models import User

# The second value names the order in a cursor.
_ORDERS = {
    "created": "id",
    "name": "name",
    "project": "project__slug",
    "owner": "owner__username",
    "state": "latest__state",
    "started": "started_or_never",
    "ended": "ended_or_never",
}
_TIMES = {"started", "ended"}
SORTS = [sign + name for name in _ORDERS for sign in ("", "-")]


class JobSearch(JobCriteria):
    """A search for jobs: its criteria, and the pages of jobs that meet them."""

    def page(
        self,
        user: User,
        *,
        cursor: str | None = None,
        limit: int = 50,
        without: tuple[str, ...] = (),
        finder: Finder | None = None,
    ) -> Page[Job]:
        """Return one page: its ids, then its jobs and their tags in two queries.

        `without` names columns not to read; `finder` reuses the one of this search, if there is one already.

        A page may be short, or even empty, and still have a next one: the search has then scanned so many jobs that
        do not
        match that the caller decides whether to continue (jobs.listing.finder).
        """
        order = SortOrder(_ORDERS[self._sort], self._descending)
        found_places = (finder or self.finder(user)).page(self._place(cursor, order), limit)
        numbers = [pk for _, pk in found_places.places]
        jobs = Job.objects.visible_to(user).with_latest_attempt()
        rows = jobs.defer("spec_toml", *without).in_bulk(numbers) if numbers else {}
        items = [rows[pk] for pk in numbers if pk in rows]  # one may have been deleted in between
        _load_tags(items)
        _break_cycles(items)
        if found_places.next is None:
            return Page(items, None)
        value, pk = found_places.next
        return Page(items, encode(order, _time(value) if self._sort in _TIMES else value, pk))

    def finder(self, user: User) -> Finder:
        """Return the finder for this person's pages and counts, which share what the first one looked up."""
        return Finder(resolve(self, user), self._sort, self._descending)

    @property
    def _sort(self) -> str:
        return self.sort.removeprefix("-")

    @property
    def _descending(self) -> bool:
        return self.sort.startswith("-")

    def _place(self, cursor: str | None, order: SortOrder) -> Place | None:
        if not cursor:
            return None
        value, pk = decode(cursor, order)
        wanted: type = datetime if self._sort in _TIMES else type(None) if self._sort == "created" else str
        if not isinstance(value, wanted):
            raise BadCursor
        return (connection.ops.adapt_datetimefield_value(value) if isinstance(value, datetime) else value), pk


def _load_tags(jobs: list[Job]) -> None:
    """Set the jobs' `tag_names` in one query."""
    named: dict[int, list[str]] = defaultdict(list)
    for job_id, name in Tag.objects.filter(job__in=[job.pk for job in jobs]).values_list("job", "name"):
        named[job_id].append(name)
    for job in jobs:
        job.tag_names = sorted(named[job.pk])


def _break_cycles(jobs: list[Job]) -> None:
    """Remove the reference from each latest attempt back to its job, which select_related sets.

    Only the garbage collector frees such cycles, and every tenth page of 200 took 80 ms longer for it.
    """
    back = Job._meta.get_field("latest").remote_field
    for job in jobs:
        if job.latest is not None:
            back.delete_cached_value(job.latest)


def _time(value: Any) -> datetime:
    """Return the value as a datetime: SQLite stores times as text."""
    return datetime.fromisoformat(value).replace(tzinfo=UTC) if isinstance(value, str) else value
