"""Search the scheduler's queue, with the same filters and order for the page, the API and the CLI."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

from django.db.models import BigIntegerField, Case, ExpressionWrapper, F, Q, QuerySet, Sum, Value, When
from django.db.models.functions import Cast
from django.utils import timezone

from jobs.listing import visibility
from jobs.models import Attempt, Job, Sweep
from jobs.waiting.reasons import explained, scheduled_start
from nodes.cluster import sync
from nodes.models import QueuedJob, Reading
from nodes.schedulers.launch import LAUNCH_FAILED
from portal.http.paging import Page, SortOrder, page
from portal.models import User
from vigil_core import formatting
from vigil_core.untrusted import whole

STATES = ("pending", "running", "suspended", "completing")
HOLD_REASONS = ("JobHeld", LAUNCH_FAILED)  # prefix of Slurm's reason for a job waiting to be released
READING_LAG = timedelta(seconds=30)  # longest time of one reading; jobs submitted meanwhile may be missing
MAX_UNSEEN = 10_000
_GROUP = 10**12  # above any priority, so that one number combines group and priority
_ORDER = SortOrder("place")


@dataclass(frozen=True)
class QueueEntry:
    """A job of the scheduler as one person may see it."""

    row: QueuedJob
    given_name: str  # the name given by the person
    job: Job | None  # Vigil's job, if the person may see it
    sweep: Sweep | None  # the same for an array
    is_mine: bool
    position: int | None  # position by priority among the waiting jobs of its partition; 1 is next
    of: int

    @property
    def name(self) -> str:
        if self.job:
            return self.job.name
        return self.sweep.name if self.sweep else self.given_name

    @property
    def user(self) -> str:
        owned = self.job or self.sweep
        return owned.owner.username if owned else self.row.user

    @property
    def why(self) -> str:
        """Return why it waits: the scheduler's reason, explained."""
        if self.row.state != "pending":
            return ""
        if self.job and (start := scheduled_start(self.row.reason, self.job.spec, timezone.now())):
            return start
        return explained(self.row.reason, self.row.scheduler_id, self.job.pk if self.job else None)

    @property
    def is_held(self) -> bool:
        return self.row.state == "pending" and self.row.reason.startswith(HOLD_REASONS)


@dataclass(frozen=True, kw_only=True)
class QueueSearch:
    """The filters of a queue search. Each word of `text` is part of the name, or a number, a person or an account."""

    text: str = ""
    states: list[str] = field(default_factory=list)
    partition: str = ""
    user: str = ""
    mine: bool = False

    def page(self, user: User, *, cursor: str | None = None, limit: int = 50) -> Page[QueuedJob]:
        """Return one page: the person's own jobs first, then pending ones, next to start first, then running ones."""
        rows = self._in_states(user)
        group = Case(
            When(visibility.submitted_by(user) & Q(state="pending"), then=Value(1)),
            When(visibility.submitted_by(user), then=Value(0)),
            When(state="pending", then=Value(2)),
            default=Value(3),
            output_field=BigIntegerField(),
        )
        # An explicit wide type: Django would use a narrow one, and PostgreSQL's ends at 2^31.
        place = ExpressionWrapper(Cast(group, BigIntegerField()) * _GROUP - F("priority"), BigIntegerField())
        return page(rows.annotate(place=place), _ORDER, cursor=cursor, limit=limit)

    def counts(self, user: User) -> dict[str, int]:
        """Return the number of matching jobs in each state, ignoring the filter on states.

        An array counts its tasks.
        """
        return dict(self._filtered(user).order_by().values_list("state").annotate(jobs=Sum("tasks")))

    def rows(self, user: User) -> int:
        """Return the number of matching rows: fewer than jobs if an array waits."""
        return self._in_states(user).count()

    def _in_states(self, user: User) -> QuerySet[QueuedJob]:
        rows = self._filtered(user)
        return rows.filter(state__in=self.states) if self.states else rows

    def _filtered(self, user: User) -> QuerySet[QueuedJob]:
        rows = visibility.visible_queue(user)
        if self.mine:
            rows = rows.filter(visibility.submitted_by(user))
        if self.user:
            rows = rows.filter(user=self.user)
        if self.partition:
            rows = rows.filter(Q(partition=self.partition) | Q(partition__regex=_listed(self.partition)))
        for word in self.text.split()[:10]:
            matches = Q(name__icontains=word) | Q(user__icontains=word) | Q(account__icontains=word)
            matches |= Q(component=word)
            if (number := whole(word.lstrip("#"))) is not None:
                matches |= Q(scheduler_id=str(number))
            rows = rows.filter(matches)
        return rows


def _listed(partition: str) -> str:
    """Return a pattern for this partition in a comma-separated list, as a job may wait in several."""
    return rf"(^|,){re.escape(partition)}(,|$)"


@dataclass(frozen=True)
class Unseen:
    """The number of a person's jobs that the rows of the queue cannot show yet."""

    unsubmitted: int  # not submitted by Vigil yet
    newer: int  # submitted since the queue was read

    @property
    def text(self) -> str:
        """Return the numbers as sentences; "" if the rows show all jobs."""
        sentences = []
        if self.unsubmitted:
            has = "has" if self.unsubmitted == 1 else "have"
            sentences.append(
                f"{formatting.plural(self.unsubmitted, 'job')} of yours {has} not been submitted to the scheduler yet."
            )
        if self.newer:
            was = "was" if self.newer == 1 else "were"
            sentences.append(
                f"{formatting.plural(self.newer, 'job')} of yours {was} submitted since the queue was last read."
            )
        return formatting.plain_spaces(" ".join(sentences))  # for the command line as well


def unseen_jobs(user: User) -> Unseen:
    """Count the jobs that the person has submitted and cannot find in the queue."""
    read_at = sync.readings()[Reading.Part.QUEUE].read_at
    alive = Attempt.objects.alive().filter(job__owner=user).exclude(job__kind=Job.ATTACHED)
    handed = alive.exclude(scheduler_id="").exclude(submitted_at=None)
    if read_at is not None:
        handed = handed.filter(submitted_at__gt=read_at - READING_LAG)
    ids = set(handed.order_by("-id").values_list("scheduler_id", flat=True)[:MAX_UNSEEN])
    arrays = {scheduler_id.partition("_")[0] for scheduler_id in ids}
    there = set(QueuedJob.objects.filter(scheduler_id__in=ids | arrays).values_list("scheduler_id", flat=True))
    newer = sum(1 for scheduler_id in ids if scheduler_id not in there and scheduler_id.partition("_")[0] not in there)
    return Unseen(alive.filter(scheduler_id="").count(), newer)


def describe_rows(user: User, rows: list[QueuedJob]) -> list[QueueEntry]:
    """Return queue rows with everything else known of them, in a few queries for any number of rows."""
    jobs = visibility.jobs_of(user, (row.scheduler_id for row in rows))
    sweeps = visibility.sweeps_of(user, (row for row in rows if row.scheduler_id not in jobs))
    given = visibility.names_of(rows)
    positions, waiting = _positions(rows)
    return [
        QueueEntry(
            row=row,
            given_name=given[row.scheduler_id],
            job=(job := jobs.get(row.scheduler_id)),
            sweep=(sweep := sweeps.get(row.scheduler_id)),
            is_mine=(bool(row.user) and row.user == user.slurm_user)
            or any(item is not None and item.owner_id == user.pk for item in (job, sweep)),
            position=positions.get(row.pk),
            of=waiting[row.partition],
        )
        for row in rows
    ]


def _positions(rows: list[QueuedJob]) -> tuple[dict[int, int], Counter[str]]:
    """Return the position in its partition of each pending row that is not held, an array's by its first task.

    The second value is how many tasks wait in each partition.
    """
    places = {row.partition for row in rows if row.state == "pending"}
    if not places:
        return {}, Counter()
    wanted = {row.pk for row in rows}
    waiting = QueuedJob.objects.filter(state="pending", partition__in=places).exclude(
        reason__regex=f"^({'|'.join(HOLD_REASONS)})"
    )
    counts: Counter[str] = Counter()
    positions = {}
    ordered = waiting.order_by("-priority", "id").values_list("pk", "partition", "tasks")
    for pk, partition, tasks in ordered.iterator():
        if pk in wanted:
            positions[pk] = counts[partition] + 1
        counts[partition] += tasks
    return positions, counts
