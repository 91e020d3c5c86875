"""What the accounts tell: of jobs that slurmctld has forgotten, and why the run before a restart ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Set
from dataclasses import dataclass, replace

from nodes.schedulers.base import ENDED, UNKNOWN, JobStatus, SchedulerError
from nodes.schedulers.launch import with_nodes
from nodes.schedulers.slurm.http import NotSlurms
from nodes.schedulers.slurm.rest import Run, SlurmRest

logger = logging.getLogger(__name__)

AT_ONCE = 20  # jobs that are asked about in one round
AGAIN_S = 10.0  # until the accounts are asked again about a job whose end they do not tell
AWAY_S = 5.0  # for so long they are left alone after they did not answer: each question may take a time-out
LAG_S = 8.0  # by which they may hear of an end later than slurmctld starts the next run
WONDER_S = 3600.0  # after which nobody remembers having waited to be told


@dataclass(frozen=True)
class Before:
    """The run before a restart. `ended`: why, a word of ENDED, "" for a plain requeue."""

    ended: str = ""
    nodes: tuple[str, ...] = ()


class PastJobs:
    """Remembers what it was told, so that the accounts are asked once about each end."""

    def __init__(self, rest: SlurmRest) -> None:
        self.rest = rest
        self.ended: dict[str, JobStatus] = {}  # by the id that was asked for
        self.told: dict[str, tuple[float, JobStatus | None]] = {}  # no end: when that was, and what
        self.before: dict[tuple[str, int], Before] = {}  # (id, restart count) → the run before
        self.wondered: dict[tuple[str, int], float] = {}  # since when we wait to be told that
        self.away_until = float("-inf")

    def keep_only(self, wanted: Set[str]) -> None:
        """Nobody asks any more about the others: weeks go by, and an id may be given to another job."""
        self.ended = {known: status for known, status in self.ended.items() if known in wanted}
        self.told = {known: told for known, told in self.told.items() if known in wanted}
        self.before = {place: word for place, word in self.before.items() if place[0] in wanted}
        long_ago = time.monotonic() - WONDER_S
        self.wondered = {place: since for place, since in self.wondered.items() if since > long_ago}

    def tell(self, scheduler_ids: list[str]) -> dict[str, JobStatus]:
        """Tells of jobs that slurmctld forgot. What cannot be asked now is UNKNOWN, what accounts lack is left out."""
        if not self.rest.has_accounts:
            return {}
        now = time.monotonic()
        never = (float("-inf"), None)
        due = [known for known in scheduler_ids if now - self.told.get(known, never)[0] > AGAIN_S]
        due.sort(key=lambda known: self.told.get(known, never)[0])  # so that none waits for others without end
        for scheduler_id in due[:AT_ONCE]:
            try:
                found = self._accounted(scheduler_id)
            except SchedulerError as error:
                logger.warning("job %s: the accounts do not answer: %s", scheduler_id, error)
                if not _is_about_one(error):
                    break
                found = JobStatus(scheduler_id=scheduler_id, state=UNKNOWN)
            if found is not None and found.state in ENDED:
                self.ended[scheduler_id] = found
            else:
                self.told[scheduler_id] = now, found
        answer = {}
        for scheduler_id in scheduler_ids:
            unknown = JobStatus(scheduler_id=scheduler_id, state=UNKNOWN)
            told = self.ended.get(scheduler_id) or self.told.get(scheduler_id, (now, unknown))[1]
            if told is not None:
                answer[scheduler_id] = told
        return answer

    def with_before(self, status: JobStatus) -> JobStatus:
        """Adds the end of the run before a restart. UNKNOWN until the accounts have heard of it."""
        if not status.restart_count or status.before or status.state == UNKNOWN or not self.rest.has_accounts:
            return status
        place = (status.scheduler_id, status.restart_count)
        if place not in self.before:
            since = self.wondered.setdefault(place, time.monotonic())
            found = self._ask_before(status)
            if found is None and time.monotonic() - since < LAG_S:
                return replace(status, state=UNKNOWN)
            self.before[place] = found or Before()
            self.wondered.pop(place, None)
        before = self.before[place]
        reason = with_nodes(status.reason, before.nodes)
        return replace(status, reason=reason, before=before.ended, nodes_before=before.nodes)

    def _accounted(self, scheduler_id: str) -> JobStatus | None:
        """The status of a job's last run: its end, or UNKNOWN; None where the accounts lack it.

        Where slurmctld lost its state, they call all that ran cancelled: nobody did that, so they are as if not there.
        """
        records = [run.record for run in self._runs(scheduler_id) if run.record.has(scheduler_id)]
        if not records or records[-1].was_dropped:
            return None
        runs = [record.status for record in records]
        last = runs[-1]
        if last.state not in ENDED:  # slurmctld does not know it, the accounts have not heard of its end: not yet told
            return JobStatus(scheduler_id=scheduler_id, state=UNKNOWN, key=last.key, other_key=last.other_key)
        before = _before(runs, last.restart_count) or Before()
        return replace(last, scheduler_id=scheduler_id, before=before.ended, nodes_before=before.nodes)

    def _runs(self, scheduler_id: str) -> list[Run]:
        """All there is of a job, or of its array; SchedulerError for a while after the accounts did not answer."""
        if time.monotonic() < self.away_until:
            raise SchedulerError("The accounts (slurmdbd) did not answer just now; they are asked again soon.")
        try:
            return self.rest.runs(scheduler_id.partition("_")[0])
        except SchedulerError as error:
            if not _is_about_one(error):
                self.away_until = time.monotonic() + AWAY_S
            raise

    def _ask_before(self, status: JobStatus) -> Before | None:
        """Return the run before this one; None where the accounts do not tell yet."""
        try:
            runs = self._runs(status.scheduler_id)
        except SchedulerError:
            return None
        told = [run.record.status for run in runs if run.record.has(status.scheduler_id)]
        return _before(told, status.restart_count)


def _is_about_one(error: SchedulerError) -> bool:
    """Return whether the accounts are there and only what was asked about one job has no readable answer."""
    return error.permanent or isinstance(error, NotSlurms)


def _before(runs: list[JobStatus], restart_count: int) -> Before | None:
    """Return the run before this one; None where its end is not told yet."""
    earlier = [run for run in runs if run.restart_count == restart_count - 1]
    return Before(earlier[-1].before, earlier[-1].nodes) if earlier and earlier[-1].ended_at else None
