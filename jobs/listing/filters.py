"""Turn a job search into SQL: conditions on a row, and sources that yield the few jobs that could match."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from types import ModuleType
from typing import Any

from django.db import connection

from jobs.listing import postgres, sqlite
from jobs.listing.criteria import JobCriteria
from jobs.listing.sql import Sql
from jobs.models.job import Tag
from portal.models import Project, User
from vigil_core.untrusted import whole

MAX_CLOCK_SETBACK = timedelta(days=2)
"""Job ids increase with submission time, except if a clock was set back by up to this much."""
_MIN_WORD_LENGTH = 3  # shortest word that a trigram index can find


@dataclass(frozen=True)
class SearchWord:
    """A search word: part of a name, or a job number, tag, project or person."""

    text: str
    projects: list[int]
    owners: list[int]
    is_tag: bool  # of any job

    @property
    def condition(self) -> Sql:
        parts = [f"l.name {dialect().LIKE}"]
        params: list[Any] = [postgres.name_pattern(self.text)]  # a LIKE pattern for both databases
        if self.is_tag:
            parts.append("EXISTS (SELECT 1 FROM jobs_tag t WHERE t.job_id = l.id AND t.name = %s)")
            params.append(self.text)
        for column, ids in (("project_id", self.projects), ("owner_id", self.owners), ("id", self._numbers)):
            if ids:
                parts.append(in_list(f"l.{column}", ids).text)
                params += ids
        return Sql(f"({' OR '.join(parts)})", tuple(params))

    @property
    def source(self) -> Sql | None:
        """Return SQL for the ids of all matching jobs, possibly repeated, using indexes only.

        None if the word is too short.
        """
        if len(self.text) < _MIN_WORD_LENGTH:
            return None
        parts = [dialect().MATCHING_NAMES]
        params: list[Any] = [dialect().name_pattern(self.text)]
        if self.is_tag:
            parts.append("SELECT job_id FROM jobs_tag WHERE name = %s")
            params.append(self.text)
        for column, ids in (("project_id", self.projects), ("owner_id", self.owners), ("id", self._numbers)):
            if ids:
                parts.append(f"SELECT id FROM jobs_listing WHERE {in_list(column, ids).text}")
                params += ids
        return Sql(" UNION ALL ".join(f"SELECT * FROM ({part} LIMIT {{most}}) w" for part in parts), tuple(params))

    @property
    def _numbers(self) -> list[int]:
        number = whole(self.text.removeprefix("#"))
        return [] if number is None else [number]


@dataclass(frozen=True)
class JobQuery:
    """A search with its names resolved to ids. `None` means no restriction; an empty list can never match."""

    scope: list[int] | None  # projects that the person may see and selected
    states: list[str] | None
    rest: list[Sql] = field(default_factory=list)  # conditions besides scope and states
    words: list[SearchWord] = field(default_factory=list)
    owner: int | None = None
    sources: list[Sql] = field(default_factory=list)  # each returns the ids of all jobs that could match
    bounds: list[Sql] = field(default_factory=list)  # range of ids, if filtered by submission time

    @property
    def is_impossible(self) -> bool:
        return self.scope == [] or self.states == [] or self.owner == -1

    @property
    def is_plain(self) -> bool:
        """Return whether only projects and states are restricted."""
        return not self.rest and not self.words

    def conditions(self, *, states: bool = True) -> list[Sql]:
        found = [*self.rest, *(word.condition for word in self.words)]
        if self.scope is not None:
            found.append(in_list("l.project_id", self.scope))
        if states and self.states is not None:
            found.append(in_list("l.state", self.states))
        return found

    def candidates(self, *, states: bool = True) -> list[Sql]:
        """Return indexed sources that may yield few jobs."""
        sources = list(self.sources)
        equal = []
        if self.scope is not None:
            equal.append(in_list("project_id", self.scope))
        if states and self.states is not None:
            equal.append(in_list("state", self.states))
        if equal:
            sources.append(select("id", equal))
        return sources


def dialect() -> ModuleType:
    return postgres if connection.vendor == "postgresql" else sqlite


def in_list(column: str, values: Sequence[Any]) -> Sql:
    return Sql(f"{column} IN ({', '.join(['%s'] * len(values))})", tuple(values))


def select(columns: str, where: Sequence[Sql]) -> Sql:
    return with_conditions(f"SELECT {columns} FROM jobs_listing", where)


def with_conditions(head: str, where: Sequence[Sql], tail: str = "") -> Sql:
    """Return a statement with all of these conditions."""
    text = " AND ".join(f"({condition.text})" for condition in where)
    return Sql(
        f"{head}{' WHERE ' if where else ''}{text}{tail}",
        tuple(value for condition in where for value in condition.params),
    )


def resolve(search: JobCriteria, user: User) -> JobQuery:
    """Look up the names in a search: projects that the user may see, people and words."""
    owner = _owner(search.owner) if search.owner else None
    rest, sources, bounds = list(_rest(search)), list(_sources(search)), list(_bounds(search))
    if owner is not None:
        rest.append(Sql("l.owner_id = %s", (owner,)))
        sources.append(Sql("SELECT id FROM jobs_listing WHERE owner_id = %s", (owner,)))
    return JobQuery(
        scope=_scope(search, user),
        states=search.expanded_states() if search.states else None,
        rest=rest,
        words=_words(search.text.split()[:8]),
        owner=owner,
        sources=sources,
        bounds=bounds,
    )


def _scope(search: JobCriteria, user: User) -> list[int] | None:
    if user.is_sysadmin and not search.projects:
        return None
    projects = Project.objects.visible_to(user).order_by()
    if search.projects:
        projects = projects.filter(slug__in=search.projects)
    return sorted(projects.values_list("pk", flat=True))


def _owner(name: str) -> int:
    return User.objects.filter(username=name).values_list("pk", flat=True).first() or -1


def _words(words: list[str]) -> list[SearchWord]:
    if not words:
        return []
    projects = dict(Project.objects.filter(slug__in=words).order_by().values_list("slug", "pk"))
    owners = dict(User.objects.filter(username__in=words).values_list("username", "pk"))
    return [
        SearchWord(
            word,
            [projects[word]] if word in projects else [],
            [owners[word]] if word in owners else [],
            Tag.objects.filter(name=word).exists(),
        )
        for word in words
    ]


def _rest(search: JobCriteria) -> Iterator[Sql]:
    if search.kind:
        yield Sql("l.kind = %s", (search.kind,))
    for tag in search.tags:
        yield Sql("EXISTS (SELECT 1 FROM jobs_tag t WHERE t.job_id = l.id AND t.name = %s)", (tag,))
    for column, value in (("parent_id", search.parent), ("sweep_id", search.sweep)):
        if value:
            yield Sql(f"EXISTS (SELECT 1 FROM jobs_job j WHERE j.id = l.id AND j.{column} = %s)", (value,))
    yield from _times(search, "l.created_at")


def _sources(search: JobCriteria) -> Iterator[Sql]:
    if search.kind:
        yield Sql("SELECT id FROM jobs_listing WHERE kind = %s", (search.kind,))
    for tag in search.tags:
        yield Sql("SELECT job_id AS id FROM jobs_tag WHERE name = %s", (tag,))
    for column, value in (("parent_id", search.parent), ("sweep_id", search.sweep)):
        if value:
            yield Sql(f"SELECT id FROM jobs_job WHERE {column} = %s", (value,))
    if times := list(_times(search, "created_at")):
        yield select("id", times)


def _times(search: JobCriteria, column: str) -> Iterator[Sql]:
    for sign, time in ((">=", search.created_after), ("<", search.created_before)):
        if time:
            yield Sql(f"{column} {sign} %s", (connection.ops.adapt_datetimefield_value(time),))


def _bounds(search: JobCriteria) -> Iterator[Sql]:
    """Yield bounds on job ids for the requested times, so that a scan by id starts and ends there."""
    if search.created_after:
        last = "SELECT id FROM jobs_listing WHERE created_at < %s ORDER BY created_at DESC, id DESC LIMIT 1"
        yield Sql(f"id > COALESCE(({last}), 0)", (_moved(search.created_after, -MAX_CLOCK_SETBACK),))
    if search.created_before:
        first = "SELECT id FROM jobs_listing WHERE created_at >= %s ORDER BY created_at, id LIMIT 1"
        yield Sql(f"id < COALESCE(({first}), {2**63 - 1})", (_moved(search.created_before, MAX_CLOCK_SETBACK),))


def _moved(time: datetime, by: timedelta) -> Any:
    with suppress(OverflowError):  # before the first or after the last possible date
        time += by
    return connection.ops.adapt_datetimefield_value(time)
