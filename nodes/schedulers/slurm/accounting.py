"""Read from Slurm's accounting: jobs that slurmctld has forgotten, and why the run before a restart ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Set
from dataclasses import dataclass, replace

from nodes.schedulers.base import ENDED, UNKNOWN, JobStatus, SchedulerError
from nodes.schedulers.launch import with_nodes
from nodes.schedulers.slurm.http import UnexpectedResponse
from nodes.schedulers.slurm.rest import AccountedRun, SlurmRest

logger = logging.getLogger(__name__)

MAX_PER_ROUND = 20  # jobs queried in one call of `statuses`
RETRY_S = 10.0  # until accounting is queried again about a job that has no end there yet
BACKOFF_S = 5.0  # without queries after one got no answer: each may take a whole timeout
LAG_S = 8.0  # accounting may record an end this long after slurmctld starts the next run
MAX_WAIT_S = 3600.0  # after which an unanswered wait for the previous run is forgotten


@dataclass(frozen=True)
class PreviousRun:
    """The run before a restart. `ended` is why it ended, one of ENDED; "" for a plain requeue."""

    ended: str = ""
    nodes: tuple[str, ...] = ()


class PastJobs:
    """Query accounting about jobs, and cache the results so that each end is queried once."""

    def __init__(self, rest: SlurmRest) -> None:
        self.rest = rest
        self.ended: dict[str, JobStatus] = {}  # by the requested id
        self.pending: dict[str, tuple[float, JobStatus | None]] = {}  # without an end: when queried, and the result
        self.previous_runs: dict[tuple[str, int], PreviousRun] = {}  # (id, restart count) → the run before
        self.waiting_since: dict[tuple[str, int], float] = {}  # since when we have waited for that run
        self.retry_at = float("-inf")

    def keep_only(self, wanted: Set[str]) -> None:
        """Drop cached jobs outside `wanted`: they are of no interest any more, and Slurm may reuse their ids."""
        self.ended = {scheduler_id: status for scheduler_id, status in self.ended.items() if scheduler_id in wanted}
        self.pending = {scheduler_id: result for scheduler_id, result in self.pending.items() if scheduler_id in wanted}
        self.previous_runs = {key: run for key, run in self.previous_runs.items() if key[0] in wanted}
        long_ago = time.monotonic() - MAX_WAIT_S
        self.waiting_since = {key: since for key, since in self.waiting_since.items() if since > long_ago}

    def statuses(self, scheduler_ids: list[str]) -> dict[str, JobStatus]:
        """Return the status of jobs that slurmctld has forgotten, by id.

        A job that cannot be queried now is UNKNOWN; one that accounting lacks is left out.
        """
        if not self.rest.has_accounting:
            return {}
        now = time.monotonic()
        never = (float("-inf"), None)
        due = [
            scheduler_id for scheduler_id in scheduler_ids if now - self.pending.get(scheduler_id, never)[0] > RETRY_S
        ]
        # The longest unqueried first, so that every job gets its turn.
        due.sort(key=lambda scheduler_id: self.pending.get(scheduler_id, never)[0])
        for scheduler_id in due[:MAX_PER_ROUND]:
            try:
                found = self._last_run(scheduler_id)
            except SchedulerError as error:
                logger.warning("job %s: accounting does not respond: %s", scheduler_id, error)
                if not _is_job_specific(error):
                    break
                found = JobStatus(scheduler_id=scheduler_id, state=UNKNOWN)
            if found is not None and found.state in ENDED:
                self.ended[scheduler_id] = found
            else:
                self.pending[scheduler_id] = now, found
        statuses = {}
        for scheduler_id in scheduler_ids:
            unknown = JobStatus(scheduler_id=scheduler_id, state=UNKNOWN)
            status = self.ended.get(scheduler_id) or self.pending.get(scheduler_id, (now, unknown))[1]
            if status is not None:
                statuses[scheduler_id] = status
        return statuses

    def with_previous_run(self, status: JobStatus) -> JobStatus:
        """Add why and where the run before a restart ended; UNKNOWN until accounting has recorded it."""
        if not status.restart_count or status.previous_end or status.state == UNKNOWN or not self.rest.has_accounting:
            return status
        run_key = (status.scheduler_id, status.restart_count)
        if run_key not in self.previous_runs:
            since = self.waiting_since.setdefault(run_key, time.monotonic())
            found = self._previous_run(status)
            if found is None and time.monotonic() - since < LAG_S:
                return replace(status, state=UNKNOWN)
            self.previous_runs[run_key] = found or PreviousRun()
            self.waiting_since.pop(run_key, None)
        previous = self.previous_runs[run_key]
        reason = with_nodes(status.reason, previous.nodes)
        return replace(status, reason=reason, previous_end=previous.ended, previous_nodes=previous.nodes)

    def _last_run(self, scheduler_id: str) -> JobStatus | None:
        """Return the status of a job's last run: its end, or UNKNOWN; None if accounting lacks it.

        Where slurmctld lost its state, accounting lists all its running jobs as cancelled. Nobody cancelled them: treat
        them as missing.
        """
        records = [run.record for run in self._runs(scheduler_id) if run.record.has(scheduler_id)]
        if not records or records[-1].was_dropped:
            return None
        runs = [record.status for record in records]
        last = runs[-1]
        if last.state not in ENDED:  # neither slurmctld nor accounting has its end yet
            return JobStatus(scheduler_id=scheduler_id, state=UNKNOWN, key=last.key, other_key=last.other_key)
        previous = _previous(runs, last.restart_count) or PreviousRun()
        return replace(last, scheduler_id=scheduler_id, previous_end=previous.ended, previous_nodes=previous.nodes)

    def _runs(self, scheduler_id: str) -> list[AccountedRun]:
        """Return all runs of a job or of its array. Raise SchedulerError during the back-off after a failure."""
        if time.monotonic() < self.retry_at:
            raise SchedulerError("Accounting (slurmdbd) did not respond a moment ago; the query is retried soon.")
        try:
            return self.rest.runs(scheduler_id.partition("_")[0])
        except SchedulerError as error:
            if not _is_job_specific(error):
                self.retry_at = time.monotonic() + BACKOFF_S
            raise

    def _previous_run(self, status: JobStatus) -> PreviousRun | None:
        """Return the run before this one; None if accounting does not have it yet."""
        try:
            runs = self._runs(status.scheduler_id)
        except SchedulerError:
            return None
        found = [run.record.status for run in runs if run.record.has(status.scheduler_id)]
        return _previous(found, status.restart_count)


def _is_job_specific(error: SchedulerError) -> bool:
    """Return whether accounting is up and only the query about this job had no readable answer."""
    return error.permanent or isinstance(error, UnexpectedResponse)


def _previous(runs: list[JobStatus], restart_count: int) -> PreviousRun | None:
    """Return the run before this one; None if its end is not recorded yet."""
    earlier = [run for run in runs if run.restart_count == restart_count - 1]
    return PreviousRun(earlier[-1].previous_end, earlier[-1].nodes) if earlier and earlier[-1].ended_at else None
