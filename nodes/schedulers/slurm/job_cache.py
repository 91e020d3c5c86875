"""Cache slurmctld's jobs and keep them current with as few requests as possible.

Where Slurm has a short list of job states (REST v0.0.40), read that, then the jobs that changed; elsewhere read all
jobs, but only if something has changed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Set
from dataclasses import dataclass, field, replace

from nodes.schedulers.base import ENDED, JobStatus, SchedulerError
from nodes.schedulers.cluster import QueuedJobInfo
from nodes.schedulers.slurm.http import SlurmUnreachable, TokenRejected
from nodes.schedulers.slurm.rest import JobList, SlurmRest
from nodes.schedulers.slurm.shapes import JobRecord

logger = logging.getLogger(__name__)

MAX_PENDING_REFRESHED = 10  # pending jobs whose reasons are re-read in one refresh
MAX_SINGLE_REQUESTS = 20  # changed jobs read one by one; beyond that all jobs are listed
GAP_S = 10.0  # without a refresh, in which a job may have been requeued and restarted unnoticed
FRESH_S = 1.0  # a job read this recently is not read again
UNREADABLE_S = 60.0  # until a job that could not be read is tried again: it may cost a rediscovery
REFRESH_INTERVAL_FACTOR = 4  # minimum time between full lists, as a multiple of what one took


@dataclass
class JobCache:
    """Jobs by Slurm's job id, with their state words from /jobs/state. Times are of the monotonic clock."""

    rest: SlurmRest
    records: dict[str, JobRecord] = field(default_factory=dict)
    queue: dict[str, QueuedJobInfo] = field(default_factory=dict)
    state_words: dict[str, tuple[str, ...]] = field(default_factory=dict)
    job_ids: dict[str, str] = field(default_factory=dict)  # "<array>_<task>" → job id
    listed_at: float = float("-inf")  # when all of them were last read
    took_s: float = 0.0  # to read all of them
    last_query_at: float = float("-inf")  # when a caller last asked about jobs
    clock: float | None = None  # Slurm's time at the last full list
    default_partition: str = ""
    waiting: frozenset[str] | None = None  # array tasks, where Slurm lists them separately
    read_at: dict[str, float] = field(default_factory=dict)  # when each job was last read on its own
    single_requests: int = 0  # jobs read one by one in the last refresh
    cancelled: set[str] = field(
        default_factory=set
    )  # pending tasks that we cancelled: Slurm forgets them without a trace
    unreadable_rows: int = 0  # in the last full list
    unreadable_states: int = 0  # in the last short list
    unreadable: dict[str, float] = field(default_factory=dict)  # jobs whose own request failed, and when

    @property
    def unreadable_jobs(self) -> int:
        """Return how many jobs Slurm lists that are missing here."""
        return self.unreadable_rows + self.unreadable_states + len(self.unreadable)

    def refresh(self) -> bool:
        """Bring the cache up to date with slurmctld; return whether a request was made."""
        if self.rest.has_state_list:
            self._refresh_from_states()
            return True
        return self._refresh_from_list()

    def refresh_pending(self, scheduler_ids: Iterable[str]) -> None:
        """Re-read some of the pending jobs, in turn: the short list does not show holds or releases.

        Together with the changed jobs this stays within MAX_SINGLE_REQUESTS per refresh.
        """
        if not self.rest.has_state_list:
            return
        began = time.monotonic()
        found = {
            record.job_id
            for scheduler_id in scheduler_ids
            if (record := self.find(scheduler_id)) and _is_pending(record)
        }
        due = sorted(found, key=lambda job_id: self.read_at.get(job_id, self.listed_at))
        for job_id in due[: max(0, min(MAX_PENDING_REFRESHED, MAX_SINGLE_REQUESTS - self.single_requests))]:
            if self.read_at.get(job_id, self.listed_at) < began - FRESH_S:
                self._read_job(job_id)

    def list_all(self) -> None:
        """Read all jobs."""
        began = time.monotonic()
        found = self.rest.jobs()
        if found is not None:
            self.store(found, is_all=True)
            self.listed_at = time.monotonic()
            self.took_s = self.listed_at - began

    def store(self, found: JobList, *, is_all: bool) -> None:
        """Store these jobs; `is_all` drops all others."""
        jobs = found.records_with_queue()
        if is_all:
            for cache in (self.records, self.queue, self.job_ids, self.read_at, self.unreadable):
                cache.clear()
            self.unreadable_rows = jobs.unreadable
        self.default_partition = found.default_partition() or self.default_partition
        for record, job in jobs:
            self.unreadable.pop(record.job_id, None)
            self.records[record.job_id] = record
            if record.status.state in ENDED:
                self.queue.pop(record.job_id, None)
            else:
                self.queue[record.job_id] = job
            if record.status.scheduler_id != record.job_id:
                self.job_ids[record.status.scheduler_id] = record.job_id

    def forget(self, job_id: str) -> None:
        if (record := self.records.get(job_id)) is not None:
            self.job_ids.pop(record.status.scheduler_id, None)
        for cache in (self.records, self.queue, self.state_words, self.read_at, self.unreadable):
            cache.pop(job_id, None)

    def keep_only(self, wanted: Set[str]) -> None:
        """Drop cancelled tasks outside `wanted`: they are of no interest, and Slurm may reuse their ids."""
        self.cancelled &= wanted

    def find(self, scheduler_id: str) -> JobRecord | None:
        """Return the record of this id: the job's own, or that of the array in which the task is pending."""
        job_id = self.job_ids.get(scheduler_id, scheduler_id)
        if (record := self.records.get(job_id)) is not None and record.has(scheduler_id):
            return record
        array = self.records.get(scheduler_id.partition("_")[0])
        if array is None or not array.tasks:
            return None
        is_there = array.has(scheduler_id) if self.waiting is None else scheduler_id in self.waiting
        return array if is_there else None

    def may_be_unread(self, scheduler_id: str) -> bool:
        """Return whether Slurm may know this job although it is missing here, because a record was unreadable."""
        job_id = self.job_ids.get(scheduler_id, scheduler_id.partition("_")[0])
        if not self.rest.has_state_list:
            return self.unreadable_rows > 0
        return self.unreadable_states > 0 or (job_id in self.state_words and job_id not in self.records)

    def inferred_end(self, scheduler_id: str) -> JobStatus | None:
        """Return the end of a task that never had a record: cancelled by us, or with the rest of its array."""
        array = self.records.get(scheduler_id.partition("_")[0])
        if array is not None and array.is_array and array.status.state in ENDED and "_" in scheduler_id:
            return replace(array.status, scheduler_id=scheduler_id)
        if scheduler_id in self.cancelled:
            return JobStatus(scheduler_id=scheduler_id, state="cancelled")
        return None

    def _refresh_from_states(self) -> None:
        """Read the short list, then each job that has changed; list all jobs if many have."""
        states = self.rest.states()
        was_away = time.monotonic() - self.last_query_at > GAP_S
        state_words = states.by_job_id()
        for job_id in [job_id for job_id in (*self.records, *self.unreadable) if job_id not in state_words]:
            self.forget(job_id)
        changed = [job_id for job_id, words in state_words.items() if was_away or self.state_words.get(job_id) != words]
        changed += [job_id for job_id in self._to_retry() if job_id not in changed]
        if len(changed) > MAX_SINGLE_REQUESTS:
            self.list_all()
        else:
            for job_id in changed:
                self._read_job(job_id)
        self.single_requests = len(changed) if len(changed) <= MAX_SINGLE_REQUESTS else MAX_SINGLE_REQUESTS
        self.state_words = state_words
        self.waiting = frozenset(states.words)
        self.unreadable_states = states.unreadable

    def _read_job(self, job_id: str) -> None:
        """Re-read one job. Slurm has just sent the short list, so a malformed response concerns this job alone."""
        self.read_at[job_id] = time.monotonic()
        try:
            found = self.rest.details(job_id)
        except (SlurmUnreachable, TokenRejected):
            raise
        except SchedulerError as error:
            self._note_unreadable(job_id, str(error))
            return
        if found.records_with_queue().unreadable:
            self._note_unreadable(job_id, "its record has an unexpected form")
        self.store(found, is_all=False)

    def _note_unreadable(self, job_id: str, problem: str) -> None:
        if job_id not in self.unreadable:
            logger.warning("job %s could not be read and is left out: %s", job_id, problem)
        self.records.pop(job_id, None)
        self.queue.pop(job_id, None)
        self.unreadable[job_id] = time.monotonic()

    def _to_retry(self) -> list[str]:
        due = time.monotonic() - UNREADABLE_S
        return [job_id for job_id, tried_at in self.unreadable.items() if tried_at < due]

    def _refresh_from_list(self) -> bool:
        """List all jobs of a Slurm without the short list, if something changed; large lists less often."""
        now = time.monotonic()
        if now - self.listed_at < REFRESH_INTERVAL_FACTOR * self.took_s:
            return False
        clock = self.rest.clock()  # before the list: what changes in between is listed twice, not missed
        found = self.rest.jobs(since=None if self.clock is None else self.clock - 1)
        self.clock = clock
        if found is not None:
            self.store(found, is_all=True)
            self.listed_at, self.took_s = time.monotonic(), time.monotonic() - now
        return True


def _is_pending(record: JobRecord) -> bool:
    return record.status.state == "pending"
