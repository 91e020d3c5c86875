"""Finding jobs: one description of filters, search and order for the list page, the API and the command line."""

from dataclasses import dataclass, field
from datetime import UTC, datetime

from django.db.models import Count, DateTimeField, Exists, OuterRef, Q, QuerySet, Value
from django.db.models.functions import Coalesce

from jobs.models import Attempt, Job, Tag
from portal.asked import whole
from portal.models import User
from portal.paging import Order, Page, page

# Words for several states at once.
STATE_GROUPS: dict[str, frozenset[str]] = {
    "alive": Attempt.ALIVE,
    "bad": Attempt.ENDED_BADLY,
    "ended": frozenset(Attempt.State.values) - Attempt.ALIVE,
}
STATE_WORDS = [*Attempt.State.values, *STATE_GROUPS]
_LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)
_ORDERS = {
    "created": Order("id"),
    "name": Order("name"),
    "project": Order("project__slug", value=lambda job: job.project.slug),
    "owner": Order("owner__username", value=lambda job: job.owner.username),
    "state": Order("latest__state", value=lambda job: job.latest.state),
    "started": Order("started_or_never"),
    "ended": Order("ended_or_never"),
}
SORTS = [sign + name for name in _ORDERS for sign in ("", "-")]
DEFAULT_SORT = "-created"


@dataclass(frozen=True, kw_only=True)
class Search:
    """What somebody looks for. `text`: each word must be in the name, or be a number, tag, project or person."""

    text: str = ""
    states: list[str] = field(default_factory=list)  # states and words of STATE_GROUPS; any of them
    projects: list[str] = field(default_factory=list)
    owner: str = ""
    kind: str = ""
    tags: list[str] = field(default_factory=list)  # all of them
    created_after: datetime | None = None
    created_before: datetime | None = None
    parent: int | None = None
    sweep: int | None = None
    sort: str = DEFAULT_SORT

    def find(self, user: User) -> QuerySet[Job]:
        """The jobs that match among those the person may see, with what a list row shows, unordered."""
        jobs = self._filtered(user)
        if self.states:
            jobs = jobs.filter(latest__state__in=_spelled_out(self.states))
        return jobs

    def page(
        self, user: User, *, cursor: str | None = None, limit: int = 50, without: tuple[str, ...] = ()
    ) -> Page[Job]:
        """One page, in three queries whatever its length: keys, jobs, tags. `without`: columns not to read."""
        name = self.sort.lstrip("-")
        order = _ORDERS[name]
        order = Order(order.field, self.sort.startswith("-"), order.value)
        jobs = self.find(user).with_latest_attempt().prefetch_related("tags").defer("spec_toml", *without)  # type: ignore[attr-defined]
        if name in {"started", "ended"}:
            jobs = jobs.annotate(**{f"{name}_or_never": _or_never(f"latest__{name}_at")})
        return page(jobs, order, cursor=cursor, limit=limit)

    def counts(self, user: User) -> dict[str, int]:
        """How many jobs match in each state, the state filter itself left aside: for tabs. One query."""
        rows = self._filtered(user).order_by().values_list("latest__state").annotate(count=Count("pk"))
        return {state: count for state, count in rows if state}

    def _filtered(self, user: User) -> QuerySet[Job]:
        jobs: QuerySet[Job] = Job.objects.visible_to(user)
        for name, value in {
            "project__slug__in": self.projects,
            "owner__username": self.owner,
            "kind": self.kind,
            "created_at__gte": self.created_after,
            "created_at__lt": self.created_before,
            "parent_id": self.parent,
            "sweep_id": self.sweep,
        }.items():
            if value:
                jobs = jobs.filter(**{name: value})
        for tag in self.tags:
            jobs = jobs.filter(Exists(Tag.objects.filter(job=OuterRef("pk"), name=tag)))
        for word in self.text.split()[:8]:
            jobs = jobs.filter(_matches(word))
        return jobs


def _spelled_out(states: list[str]) -> list[str]:
    wanted: set[str] = set()
    for state in states:
        wanted |= STATE_GROUPS.get(state, frozenset({state}))
    return sorted(wanted)


def _or_never(path: str) -> Coalesce:
    return Coalesce(path, Value(_LONG_AGO, output_field=DateTimeField()))


def _matches(word: str) -> Q:
    number = word.removeprefix("#")
    found = Q(name__icontains=word) | Q(project__slug=word) | Q(owner__username=word)
    found |= Q(Exists(Tag.objects.filter(job=OuterRef("pk"), name=word)))
    if (pk := whole(number)) is not None:
        found |= Q(pk=pk)
    return found
