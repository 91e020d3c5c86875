"""Turn scheduler states into attempt states by conditional updates; a requeue becomes an attempt of its own.

Of thousands of attempts few change between two ticks: the scheduler's statuses are compared with a few columns of all
of them, and only the rows that differ are read whole.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NamedTuple

from django.db.models import F
from django.utils import timezone

from jobs import live
from jobs.burnins.advance import scheduler_ids
from jobs.disk import folders
from jobs.following import attached, ending
from jobs.following.decisions.next_attempt import next_attempt
from jobs.following.end_causes.cause import AttemptEnd
from jobs.following.end_causes.launch_failure import launch_failure_of
from jobs.following.submission import handover
from jobs.following.tick_context import TickContext
from jobs.models import Attempt, Job
from nodes.schedulers.base import ENDED, UNKNOWN, JobStatus, SchedulerError
from nodes.schedulers.launch import is_launch_failed, nodes_of
from portal.bulk import chunks
from vigil_core import formatting

logger = logging.getLogger(__name__)

MISSING_FOR = timedelta(seconds=60)  # before a job that the scheduler does not know counts as lost
UNKNOWN_STATE_FOR = timedelta(minutes=10)  # before the launcher's result counts instead of the scheduler's state
MAX_UNKNOWN_STATES = 20  # each costs an access to the shared file system
MAX_REQUEUES = 20  # of one job that a tick stores; the next ticks store the rest
APPLY_S = 3.0  # per tick; attempts that are left still differ in the next one
_REQUESTS = ("cancel_asked_at", "cancel_asked_by", "kill_requested_at", "kill_requested_by")


class TrackedAttempt(NamedTuple):
    """The stored columns of an attempt that the scheduler's status may contradict."""

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

    def matches_key(self, status: JobStatus) -> bool:
        """Return whether the status carries the attempt's key or its array's.

        Attached jobs have none of Vigil's keys.
        """
        return self.is_attached or not status.keys or not status.keys.isdisjoint({self.key, self.sweep_key})

    def is_unchanged(self, status: JobStatus) -> bool:
        """Return whether the status needs no change of the attempt, whichever job it is of."""
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

    def belongs_to_other_job(self, status: JobStatus, jobs: Mapping[str, int]) -> bool:
        """Return whether the status is of another job. `jobs`: job ids by keys other than the attempts' own."""
        if self.is_attached:
            return not status.may_belong_to(self.scheduler_user)
        if not status.keys:
            was_submitted_then = status.may_be_submitted_between(self.created_at, self.submitted_at)
            return not (was_submitted_then and status.may_belong_to(self.scheduler_user))
        return not self.matches_key(status) and all(jobs.get(key) != self.job_id for key in status.keys)


class Poll:
    """A poll of the scheduler for every attempt that has not ended."""

    def __init__(self, tick: TickContext) -> None:
        self.tick, self.lease, self.scheduler = tick, tick.lease, tick.scheduler

    def run(self) -> None:
        following = Attempt.objects.alive().exclude(scheduler_id="").order_by("id")
        following = following.annotate(sweep_key=F("job__sweep__key"), kind=F("job__kind"))
        tracked = [TrackedAttempt(*row) for row in following.values_list(*TrackedAttempt._fields)]
        burn_ins = scheduler_ids()
        if not tracked and not burn_ins:
            return
        try:
            statuses = self.scheduler.status(sorted({attempt.scheduler_id for attempt in tracked} | burn_ins))
        except SchedulerError as error:
            self.tick.outage = error
            raise
        self.tick.statuses = statuses
        until = time.monotonic() + APPLY_S
        for attempt in self._load(self._select_changed(tracked, statuses)):
            if time.monotonic() > until:
                return
            status = statuses.get(attempt.scheduler_id)
            self.tick.run_isolated(partial(self.apply, attempt, status), f"attempt {attempt.pk}")

    def apply(self, attempt: Attempt, status: JobStatus | None) -> None:
        """Update one attempt to the scheduler's status.

        It may have been requeued more than once between two ticks: each start gets its own attempt.
        """
        for _ in range(MAX_REQUEUES):
            following = self._apply(attempt, status)
            if following is None:
                return
            attempt = following

    def _apply(self, attempt: Attempt, status: JobStatus | None) -> Attempt | None:
        """Update one attempt to the scheduler's status; return the next one if it was requeued."""
        if attempt.is_unconfirmed and not attached.confirm(self.tick, attempt, status):
            return None
        if status is None:
            self.handle_missing(attempt)
            return None
        if not handover.is_same_job(attempt, status):  # nor may we cancel it
            self._end_lost(
                attempt, f"The scheduler's job {attempt.scheduler_id} is another one: its job ids were reset."
            )
            return None
        if attempt.unknown_since is not None:
            self.tick.note(attempt, unknown_since=None)
        if status.state == UNKNOWN:
            self.handle_unknown_state(attempt)
            return None
        if attempt.untold_since is not None:
            self.tick.note(attempt, untold_since=None)
        if status.restart_count > attempt.scheduler_restart_count:
            return self.handle_requeue(attempt, status)
        if status.state in Attempt.ALIVE:
            self._update(attempt, status)
        else:
            # It may have started and ended between two ticks, so nodes and start are stored first. The state is left to
            # the update that ends it, with ended_at and the cause: nobody reads one without the others.
            self._update(attempt, status, keep_state=True)
            result = folders.result_of(attempt)
            launch_failure = None if result else launch_failure_of(attempt, status)
            ended = AttemptEnd(
                status.state,
                status.exit_code,
                status.signal,
                result,
                cancelled=attempt.cancel_asked_at is not None,
                launch_failure=launch_failure.cause if launch_failure else "",
            )
            self._end(
                attempt, ended, reason=launch_failure.reason if launch_failure else status.reason, at=status.ended_at
            )
        return None

    def handle_missing(self, attempt: Attempt) -> None:
        """Handle a job that is missing from the scheduler's answer: it counts as lost once that has lasted."""
        now = timezone.now()
        if attempt.unknown_since is None:
            self.tick.note(attempt, unknown_since=now)
        elif now - attempt.unknown_since > MISSING_FOR:
            try:  # it may still run unseen, and nothing may start alongside it; attached jobs have no restart
                if not attempt.job.is_attached:
                    self.scheduler.cancel(attempt.scheduler_id, user=attempt.scheduler_user)
            except SchedulerError as error:
                if not error.permanent:  # "there is no such job" is the expected answer
                    raise
            self._end_lost(attempt, f"The scheduler no longer knows its job {attempt.scheduler_id}.")

    def handle_unknown_state(self, attempt: Attempt) -> None:
        """Handle a job of unknown state, as when slurmctld has forgotten it and slurmdbd is unreachable.

        Once that has lasted, its launcher's result counts; without one it may still be running, unless we had it
        killed. (Accounting that missed an end never reports it, until somebody repairs it manually.)
        """
        if attempt.untold_since is None or timezone.now() - attempt.untold_since <= UNKNOWN_STATE_FOR:
            return
        result = folders.result_of(attempt)
        if result is not None or attempt.cancel_killed_at is not None:
            self._end(attempt, AttemptEnd.from_result(result, cancelled=attempt.cancel_asked_at is not None))
            return
        since = attempt.untold_since.astimezone(timezone.get_current_timezone()).strftime("%Y-%m-%d %H:%M")
        reason = f"The scheduler has not known its state since {since}"
        reason += "." if attempt.job.is_attached else ", and its launcher has not ended it."
        if attempt.reason != reason:
            self.tick.note(attempt, reason=reason)

    def handle_requeue(self, attempt: Attempt, status: JobStatus) -> Attempt | None:
        """End an attempt whose job the scheduler has restarted, and create the next one."""
        ended = AttemptEnd(status.previous_end or "requeued", result=folders.result_of(attempt))
        reason = _launch_failure(status)
        following = None
        with self.lease.writing():
            now = timezone.now()
            text = f"Requeued; continues as attempt {attempt.number + 1}."
            nodes = attempt.nodes or list(status.previous_nodes)
            if not ending.end(attempt, ended, reason=reason, nodes=nodes, decided_at=now, decision=text):
                return None
            # Read under the row's lock: a later request finds this attempt decided, and is made of the next one.
            attempt.refresh_from_db(fields=list(_REQUESTS))
            following = next_attempt(attempt, Attempt.Origin.REQUEUED)
            following.scheduler_id = attempt.scheduler_id
            following.scheduler_user = attempt.scheduler_user
            following.scheduler_restart_count = attempt.scheduler_restart_count + 1
            following.submitting_at = following.submitted_at = now
            for name in _REQUESTS:  # a requested cancel or kill still stands
                setattr(following, name, getattr(attempt, name))
            following.save()
            live.announce(following.pk)
        return following

    def _select_changed(self, tracked: Sequence[TrackedAttempt], statuses: Mapping[str, JobStatus]) -> list[int]:
        """Return the attempts to read whole: ends first, for their follow-ups; last what costs a call or a file."""
        jobs = _jobs_of_keys(tracked, statuses)
        ended: list[int] = []
        changed: list[int] = []
        missing: list[int] = []
        newly_unknown: list[int] = []
        long_unknown: list[int] = []
        now = timezone.now()
        for attempt in tracked:
            status = statuses.get(attempt.scheduler_id)
            if status is None:
                wait = attached.UNCONFIRMED_FOR if attempt.is_attached and attempt.submitted_at is None else MISSING_FOR
                if attempt.unknown_since is None or now - attempt.unknown_since > wait:
                    missing.append(attempt.pk)
            elif attempt.belongs_to_other_job(status, jobs):
                changed.append(attempt.pk)
            elif status.state == UNKNOWN:
                if attempt.untold_since is None:
                    newly_unknown.append(attempt.pk)
                if attempt.unknown_since is not None:
                    changed.append(attempt.pk)
                elif attempt.untold_since is not None and now - attempt.untold_since > UNKNOWN_STATE_FOR:
                    long_unknown.append(attempt.pk)
            elif not attempt.is_unchanged(status):
                (ended if status.state in ENDED else changed).append(attempt.pk)
        # While slurmdbd is unreachable these may be thousands at once. No page shows them yet, so none is announced.
        for part in chunks(newly_unknown):
            with self.lease.writing():
                Attempt.objects.alive().filter(pk__in=part).update(untold_since=now)
        start = int(time.monotonic()) % max(1, len(long_unknown))  # others in each tick
        rotated = long_unknown[start:] + long_unknown[:start]
        return [*ended, *changed, *missing, *rotated[:MAX_UNKNOWN_STATES]]

    def _load(self, ids: Sequence[int]) -> Iterator[Attempt]:
        """Read these rows as they are now, in this order."""
        rows = Attempt.objects.alive().with_job().select_related("cancel_asked_by", "kill_requested_by")
        for part in chunks(ids, 50):
            found = rows.in_bulk(part)
            yield from (found[pk] for pk in part if pk in found)

    def _update(self, attempt: Attempt, status: JobStatus, *, keep_state: bool = False) -> None:
        """Update state, nodes, start and reason of a live attempt; nothing is written if nothing changed."""
        reported: dict[str, Any] = {
            "nodes": list(status.nodes) or attempt.nodes,
            "started_at": _time(status.started_at),
        }
        if not keep_state:
            reported |= {"state": status.state, "reason": status.reason}
        changes = {name: value for name, value in reported.items() if value != getattr(attempt, name)}
        if not changes or (keep_state and changes.keys() == {"started_at"} and not reported["started_at"]):
            return
        with self.lease.writing():
            rows = Attempt.objects.filter(pk=attempt.pk, state=attempt.state, ended_at=None)
            if rows.update(**changes) != 1:
                return
            live.announce(attempt.pk)
        if "state" in changes:
            logger.info("attempt %s: %s → %s", attempt.pk, attempt.state, status.state)
        for name, value in changes.items():
            setattr(attempt, name, value)

    def _end(self, attempt: Attempt, ended: AttemptEnd, *, reason: str = "", at: float | None = None) -> None:
        with self.lease.writing():
            ending.end(attempt, ended, reason=reason, at=at)

    def _end_lost(self, attempt: Attempt, reason: str) -> None:
        """End an attempt that the scheduler does not know, by its launcher's result where there is one."""
        ended = AttemptEnd.from_result(folders.result_of(attempt), cancelled=attempt.cancel_asked_at is not None)
        self._end(attempt, ended, reason="" if ended.result or ended.cancelled else reason)


def _launch_failure(status: JobStatus) -> str:
    """Return why a run ended before it began; "" for every other run."""
    if not is_launch_failed(status.reason):
        return ""
    where = f" on {formatting.listed(nodes_of(status.reason))}" if nodes_of(status.reason) else ""
    return f"Slurm could not launch it{where} and requeued it."


def _jobs_of_keys(tracked: Sequence[TrackedAttempt], statuses: Mapping[str, JobStatus]) -> dict[str, int]:
    """Return job ids by the keys of other attempts: a requeued job keeps the key of its first attempt."""
    foreign: set[str] = set()
    for attempt in tracked:
        status = statuses.get(attempt.scheduler_id)
        if status is not None and not attempt.matches_key(status):
            foreign |= status.keys
    job_by_key: dict[str, int] = {}
    for part in chunks(sorted(foreign)):
        job_by_key |= dict(Attempt.objects.filter(key__in=part).values_list("key", "job_id"))
    return job_by_key


def _time(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)
