"""Scheduler states → attempt states, by conditional updates; a requeue becomes an attempt of its own.

Of thousands that are followed few change between two ticks: what the scheduler says is compared with a few columns of
all of them, and only those that differ are read whole.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple, TypeVar

from django.db.models import F
from django.utils import timezone

from jobs import live
from jobs.disk import folders
from jobs.following import attached, ending, handover
from jobs.following.cause import Ended
from jobs.following.next_attempt import next_attempt
from jobs.following.tick import TickContext
from jobs.following.unlaunched import unlaunched_of
from jobs.models import Attempt, Job
from nodes.schedulers.base import ENDED, UNKNOWN, JobStatus, SchedulerError
from nodes.schedulers.launch import is_launch_failed, nodes_of
from vigil_core import formatting

logger = logging.getLogger(__name__)
T = TypeVar("T")

MISSING_FOR = timedelta(seconds=60)  # before a scheduler that does not know a job is believed
UNTOLD_FOR = timedelta(minutes=10)  # that it cannot tell a job's state, before the launcher's last word counts
UNTOLD_AT_ONCE = 20  # of which each costs a look at the shared file system
APPLY_S = 3.0  # a tick; what is left differs in the next one as well
_REQUESTS = ("cancel_asked_at", "cancel_asked_by", "kill_requested_at", "kill_requested_by")
AT_ONCE = 500  # rows a query: SQLite bounds its variables


class Known(NamedTuple):
    """What we know of an attempt, as far as the scheduler may say otherwise."""

    pk: int
    job_id: int
    scheduler_id: str
    scheduler_user: str
    scheduler_restart_count: int
    key: str
    sweep_key: str | None
    state: str
    reason: str
    nodes: list[str]
    created_at: datetime
    started_at: datetime | None
    unknown_since: datetime | None
    untold_since: datetime | None
    kind: str
    submitted_at: datetime | None

    @property
    def is_attached(self) -> bool:
        return self.kind == Job.ATTACHED

    def is_told_of(self, status: JobStatus) -> bool:
        """Whether it goes by its own key, or by that of its array. What was handed over past us has none of ours."""
        return self.is_attached or not status.keys or not status.keys.isdisjoint({self.key, self.sweep_key})

    def is_as(self, status: JobStatus) -> bool:
        """Whether there is nothing to do about it, whoever's job it is."""
        return (
            status.state == self.state
            and status.reason == self.reason
            and status.restart_count <= self.scheduler_restart_count
            and self.unknown_since is None
            and self.untold_since is None
            and (self.submitted_at is not None or not self.is_attached)
            and (not status.nodes or list(status.nodes) == self.nodes)
            and _time(status.started_at) == self.started_at
        )

    def is_anothers(self, status: JobStatus, jobs: Mapping[str, int]) -> bool:
        """Whether it is not this attempt's job at all; `jobs`: of the keys that are not the attempts' own."""
        if self.is_attached:
            return not status.may_belong_to(self.scheduler_user)
        if not status.keys:
            is_of_then = status.may_be_submitted_between(self.created_at, self.submitted_at)
            return not (is_of_then and status.may_belong_to(self.scheduler_user))
        return not self.is_told_of(status) and all(jobs.get(key) != self.job_id for key in status.keys)


class Poll:
    """One look at everything that has not ended."""

    def __init__(self, tick: TickContext) -> None:
        self.tick, self.held, self.scheduler = tick, tick.held, tick.scheduler

    def run(self) -> None:
        following = Attempt.objects.alive().exclude(scheduler_id="").order_by("id")
        following = following.annotate(sweep_key=F("job__sweep__key"), kind=F("job__kind"))
        known = [Known(*row) for row in following.values_list(*Known._fields)]
        if not known:
            return
        try:
            told = self.scheduler.status(sorted({one.scheduler_id for one in known}))
        except SchedulerError as error:
            self.tick.away = error
            raise
        until = time.monotonic() + APPLY_S
        for attempt in self._whole(self._changed(known, told)):
            if time.monotonic() > until:
                return
            status = told.get(attempt.scheduler_id)
            self.tick.live_through(partial(self.apply, attempt, status), f"attempt {attempt.pk}")

    def apply(self, attempt: Attempt, status: JobStatus | None) -> None:
        """Bring one attempt in step with what the scheduler says of it."""
        if attempt.is_unconfirmed and not attached.confirm(self.tick, attempt, status):
            return
        if status is None:
            self.miss(attempt)
            return
        if not handover.is_of(attempt, status):  # not ours to cancel either
            self._lose(attempt, f"The scheduler's job {attempt.scheduler_id} is another one: it counts anew.")
            return
        if attempt.unknown_since is not None:
            self.tick.note(attempt, unknown_since=None)
        if status.state == UNKNOWN:
            self.wonder(attempt)
            return
        if attempt.untold_since is not None:
            self.tick.note(attempt, untold_since=None)
        if status.restart_count > attempt.scheduler_restart_count:
            # It may have been requeued more than once between two ticks: each start gets its attempt, one by one.
            following = self.requeued(attempt, status)
            if following is not None:
                self.apply(following, status)
        elif status.state in Attempt.ALIVE:
            self._move(attempt, status)
        else:
            # It may have started and ended between two ticks, so nodes and start are told first. The state is left to
            # the end's one update, with ended_at and the cause: nobody reads one without the others.
            self._move(attempt, status, keep_state=True)
            result = folders.result_of(attempt)
            unlaunched = None if result else unlaunched_of(attempt, status)
            ended = Ended(
                status.state,
                status.exit_code,
                status.signal,
                result,
                cancelled=attempt.cancel_asked_at is not None,
                unlaunched=unlaunched.cause if unlaunched else "",
            )
            self._end(attempt, ended, reason=unlaunched.reason if unlaunched else status.reason, at=status.ended_at)

    def miss(self, attempt: Attempt) -> None:
        """The scheduler's answer is without this job: believed once that has lasted."""
        now = timezone.now()
        if attempt.unknown_since is None:
            self.tick.note(attempt, unknown_since=now)
        elif now - attempt.unknown_since > MISSING_FOR:
            try:  # should it live on unseen: nothing is started beside it. Of what is not ours nothing would be
                if not attempt.job.is_attached:
                    self.scheduler.cancel(attempt.scheduler_id, user=attempt.scheduler_user)
            except SchedulerError as error:
                if not error.permanent:  # "there is no such job" is what was to be expected
                    raise
            self._lose(attempt, f"The scheduler does not know its job {attempt.scheduler_id} any more.")

    def wonder(self, attempt: Attempt) -> None:
        """The scheduler cannot tell its state, as when slurmctld has forgotten it and the accounts are away.

        Once that has lasted its launcher's last word is believed; without one it may well be running, unless we had it
        killed. (Accounts that missed an end never tell it, until somebody mends them by hand.)
        """
        if attempt.untold_since is None or timezone.now() - attempt.untold_since <= UNTOLD_FOR:
            return
        result = folders.result_of(attempt)
        if result is not None or attempt.cancel_killed_at is not None:
            self._end(attempt, Ended.untold(result, cancelled=attempt.cancel_asked_at is not None))
            return
        since = attempt.untold_since.astimezone(timezone.get_current_timezone()).strftime("%Y-%m-%d %H:%M")
        reason = f"The scheduler has not been able to tell its state since {since}"
        reason += "." if attempt.job.is_attached else ", and its launcher has not ended it."
        if attempt.reason != reason:
            self.tick.note(attempt, reason=reason)

    def requeued(self, attempt: Attempt, status: JobStatus) -> Attempt | None:
        """The scheduler has started the same job anew: this attempt has ended, and there is a next one."""
        ended = Ended(status.previous_end or "requeued", result=folders.result_of(attempt))
        reason = _not_launched(status)
        following = None
        with self.held.writing():
            now = timezone.now()
            text = f"Requeued; it goes on as attempt {attempt.number + 1}."
            nodes = attempt.nodes or list(status.previous_nodes)
            if not ending.end(attempt, ended, reason=reason, nodes=nodes, decided_at=now, decision=text):
                return None
            # Read under the row's lock: whoever asks later finds this attempt decided, and asks for the next one's end.
            attempt.refresh_from_db(fields=list(_REQUESTS))
            following = next_attempt(attempt, Attempt.Origin.REQUEUED)
            following.scheduler_id = attempt.scheduler_id
            following.scheduler_user = attempt.scheduler_user
            following.scheduler_restart_count = attempt.scheduler_restart_count + 1
            following.submitting_at = following.submitted_at = now
            for name in _REQUESTS:  # who wanted the end wants it still
                setattr(following, name, getattr(attempt, name))
            following.save()
            live.announce(following.pk)
        return following

    def _changed(self, known: Sequence[Known], told: Mapping[str, JobStatus]) -> list[int]:
        """Whom to look at: ends first, for what follows them, and last what costs another call, or a file."""
        jobs = _jobs_of_keys(known, told)
        found: tuple[list[int], ...] = ([], [], [], [])  # ended, changed, missing, untold for long
        first_untold = []
        now = timezone.now()
        for one in known:
            status = told.get(one.scheduler_id)
            if status is None:
                wait = attached.UNHEARD_FOR if one.is_attached and one.submitted_at is None else MISSING_FOR
                if one.unknown_since is None or now - one.unknown_since > wait:
                    found[2].append(one.pk)
            elif one.is_anothers(status, jobs):
                found[1].append(one.pk)
            elif status.state == UNKNOWN:
                if one.untold_since is None:
                    first_untold.append(one.pk)
                if one.unknown_since is not None:
                    found[1].append(one.pk)
                elif one.untold_since is not None and now - one.untold_since > UNTOLD_FOR:
                    found[3].append(one.pk)
            elif not one.is_as(status):
                found[0 if status.state in ENDED else 1].append(one.pk)
        # Where the accounts are away these may be thousands at once. No page shows them yet, so none is announced.
        for part in _parts(first_untold, AT_ONCE):
            with self.held.writing():
                Attempt.objects.alive().filter(pk__in=part).update(untold_since=now)
        start = int(time.monotonic()) % max(1, len(found[3]))  # others in each tick
        return [*found[0], *found[1], *found[2], *(found[3][start:] + found[3][:start])[:UNTOLD_AT_ONCE]]

    def _whole(self, ids: Sequence[int]) -> Iterator[Attempt]:
        """Reads these rows as they are now, in this order."""
        rows = Attempt.objects.alive().with_job().select_related("cancel_asked_by", "kill_requested_by")
        for part in _parts(ids, 50):
            found = rows.in_bulk(part)
            yield from (found[pk] for pk in part if pk in found)

    def _move(self, attempt: Attempt, status: JobStatus, *, keep_state: bool = False) -> None:
        """State, nodes, start and reason of one that lives; nothing is written when nothing changed."""
        told: dict[str, Any] = {"nodes": list(status.nodes) or attempt.nodes, "started_at": _time(status.started_at)}
        if not keep_state:
            told |= {"state": status.state, "reason": status.reason}
        changes = {name: value for name, value in told.items() if value != getattr(attempt, name)}
        if not changes or (keep_state and changes.keys() == {"started_at"} and not told["started_at"]):
            return
        with self.held.writing():
            rows = Attempt.objects.filter(pk=attempt.pk, state=attempt.state, ended_at=None)
            if rows.update(**changes) != 1:
                return
            live.announce(attempt.pk)
        if "state" in changes:
            logger.info("attempt %s: %s → %s", attempt.pk, attempt.state, status.state)
        for name, value in changes.items():
            setattr(attempt, name, value)

    def _end(self, attempt: Attempt, ended: Ended, *, reason: str = "", at: float | None = None) -> None:
        with self.held.writing():
            ending.end(attempt, ended, reason=reason, at=at)

    def _lose(self, attempt: Attempt, reason: str) -> None:
        """The end of one that the scheduler has nothing to say of, unless its launcher had a last word."""
        ended = Ended.untold(folders.result_of(attempt), cancelled=attempt.cancel_asked_at is not None)
        self._end(attempt, ended, reason="" if ended.result or ended.cancelled else reason)


def _not_launched(status: JobStatus) -> str:
    """Return why a run ended before it began; "" for every other run."""
    if not is_launch_failed(status.reason):
        return ""
    where = f" on {formatting.listed(nodes_of(status.reason))}" if nodes_of(status.reason) else ""
    return f"Slurm could not launch it{where} and put it back into the queue."


def _jobs_of_keys(known: Sequence[Known], told: Mapping[str, JobStatus]) -> dict[str, int]:
    """The jobs whose keys the scheduler names for other attempts: a requeued job keeps its first attempt's key."""
    foreign: set[str] = set()
    for one in known:
        status = told.get(one.scheduler_id)
        if status is not None and not one.is_told_of(status):
            foreign |= status.keys
    found: dict[str, int] = {}
    for part in _parts(sorted(foreign), AT_ONCE):
        found |= dict(Attempt.objects.filter(key__in=part).values_list("key", "job_id"))
    return found


def _parts(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
