"""What slurmctld last said of its jobs, kept in step with it by as few calls as it takes.

Where Slurm has a short list of states (REST v0.0.40) that is asked for, then the jobs that changed; elsewhere all of
them, but only if something has changed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Set
from dataclasses import dataclass, field, replace

from nodes.schedulers.base import ENDED, JobStatus, SchedulerError
from nodes.schedulers.cluster import QueuedJob
from nodes.schedulers.slurm.http import NoAnswer, NotTaken
from nodes.schedulers.slurm.rest import JobList, SlurmRest
from nodes.schedulers.slurm.shapes import Record

logger = logging.getLogger(__name__)

WAITING_AT_ONCE = 10  # of waiting jobs whose reasons are asked for anew, a look
SINGLY = 20  # changed jobs that are asked for one by one; more of them together
GAP_S = 10.0  # after which a job may have been requeued and started again unseen
FRESH_S = 1.0  # what was told so lately is not asked for again
UNREADABLE_S = 60.0  # until a job that could not be read is asked for again: it may cost a rediscovery
SHARE_OF_CHANGES = 4  # a list of changes is asked for again only after this many times what it took


@dataclass
class JobCache:
    """Jobs by their own ids, with the words that /jobs/state had for them. Times are of the monotonic clock."""

    rest: SlurmRest
    records: dict[str, Record] = field(default_factory=dict)
    queue: dict[str, QueuedJob] = field(default_factory=dict)
    words: dict[str, tuple[str, ...]] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)  # "<array>_<task>" → own id
    listed_at: float = float("-inf")  # when all of them were last read
    took_s: float = 0.0  # reading all of them
    asked_at: float = float("-inf")  # when somebody last wanted to know of jobs
    clock: float | None = None  # Slurm's, when it last told everything
    default_partition: str = ""
    waiting: frozenset[str] | None = None  # tasks of arrays, where Slurm lists them one by one
    told_at: dict[str, float] = field(default_factory=dict)  # when each was last asked for by itself
    asked_singly: int = 0  # in the last look
    cancelled: set[str] = field(default_factory=set)  # by us, of waiting tasks: Slurm forgets these without a word
    unreadable_rows: int = 0  # of the last full list
    unreadable_states: int = 0  # of the last short list
    unreadable: dict[str, float] = field(default_factory=dict)  # jobs whose own answer failed, and when that was

    @property
    def unreadable_jobs(self) -> int:
        """How many jobs Slurm lists that are missing here."""
        return self.unreadable_rows + self.unreadable_states + len(self.unreadable)

    def look(self) -> bool:
        """Bring the cache in step with slurmctld; tell whether it was asked at all."""
        if self.rest.tells_states:
            self._look_at_states()
            return True
        return self._look_for_changes()

    def look_at_waiting(self, scheduler_ids: Iterable[str]) -> None:
        """Ask anew for some of these that wait, in turn: the short list does not tell of a hold, nor of its release.

        Together with what had changed they are no more calls than a look may take.
        """
        if not self.rest.tells_states:
            return
        began = time.monotonic()
        found = {record.own_id for one in scheduler_ids if (record := self.find(one)) and _waits(record)}
        due = sorted(found, key=lambda own_id: self.told_at.get(own_id, self.listed_at))
        for own_id in due[: max(0, min(WAITING_AT_ONCE, SINGLY - self.asked_singly))]:
            if self.told_at.get(own_id, self.listed_at) < began - FRESH_S:
                self._ask_for(own_id)

    def list_all(self) -> None:
        """Read all of them anew."""
        began = time.monotonic()
        found = self.rest.jobs()
        if found is not None:
            self.take(found, is_all=True)
            self.listed_at = time.monotonic()
            self.took_s = self.listed_at - began

    def take(self, found: JobList, *, is_all: bool) -> None:
        """Remember these; `is_all`: and nothing but these."""
        jobs = found.both()
        if is_all:
            for known in (self.records, self.queue, self.places, self.told_at, self.unreadable):
                known.clear()
            self.unreadable_rows = jobs.unreadable
        self.default_partition = found.default_partition() or self.default_partition
        for record, job in jobs:
            self.unreadable.pop(record.own_id, None)
            self.records[record.own_id] = record
            if record.status.state in ENDED:
                self.queue.pop(record.own_id, None)
            else:
                self.queue[record.own_id] = job
            if record.status.scheduler_id != record.own_id:
                self.places[record.status.scheduler_id] = record.own_id

    def forget(self, own_id: str) -> None:
        if (record := self.records.get(own_id)) is not None:
            self.places.pop(record.status.scheduler_id, None)
        for kept in (self.records, self.queue, self.words, self.told_at, self.unreadable):
            kept.pop(own_id, None)

    def keep_only(self, wanted: Set[str]) -> None:
        """Nobody asks any more about the others: weeks go by, and an id may be given to another job."""
        self.cancelled &= wanted

    def find(self, scheduler_id: str) -> Record | None:
        """What tells of this id: a record of its own, or that of the array in which it waits."""
        own_id = self.places.get(scheduler_id, scheduler_id)
        if (known := self.records.get(own_id)) is not None and known.has(scheduler_id):
            return known
        array = self.records.get(scheduler_id.partition("_")[0])
        if array is None or not array.tasks:
            return None
        is_there = array.has(scheduler_id) if self.waiting is None else scheduler_id in self.waiting
        return array if is_there else None

    def may_be_unread(self, scheduler_id: str) -> bool:
        """Return whether Slurm may well know a job that is not here, because something it sent could not be read."""
        own_id = self.places.get(scheduler_id, scheduler_id.partition("_")[0])
        if not self.rest.tells_states:
            return self.unreadable_rows > 0
        return self.unreadable_states > 0 or (own_id in self.words and own_id not in self.records)

    def fate(self, scheduler_id: str) -> JobStatus | None:
        """The end of a task that never had a record of its own: cancelled by us, or with what was left of its array."""
        array = self.records.get(scheduler_id.partition("_")[0])
        if array is not None and array.is_array and array.status.state in ENDED and "_" in scheduler_id:
            return replace(array.status, scheduler_id=scheduler_id)
        if scheduler_id in self.cancelled:
            return JobStatus(scheduler_id=scheduler_id, state="cancelled")
        return None

    def _look_at_states(self) -> None:
        """Looks at the short list, then at each job that has changed, or at all together where many have."""
        states = self.rest.states()
        was_away = time.monotonic() - self.asked_at > GAP_S
        said = states.by_own_id()
        for own_id in [known for known in (*self.records, *self.unreadable) if known not in said]:
            self.forget(own_id)
        changed = [own_id for own_id, words in said.items() if was_away or self.words.get(own_id) != words]
        changed += [known for known in self._to_retry() if known not in changed]
        if len(changed) > SINGLY:
            self.list_all()
        else:
            for own_id in changed:
                self._ask_for(own_id)
        self.asked_singly = len(changed) if len(changed) <= SINGLY else SINGLY
        self.words = said
        self.waiting = frozenset(states.words)
        self.unreadable_states = states.unreadable

    def _ask_for(self, own_id: str) -> None:
        """Read one job anew. Slurm has just answered the short list, so an odd answer is about this job alone."""
        self.told_at[own_id] = time.monotonic()
        try:
            found = self.rest.details(own_id)
        except (NoAnswer, NotTaken):
            raise
        except SchedulerError as error:
            self._note_unreadable(own_id, str(error))
            return
        if found.both().unreadable:
            self._note_unreadable(own_id, "its record is not of the expected form")
        self.take(found, is_all=False)

    def _note_unreadable(self, own_id: str, problem: str) -> None:
        if own_id not in self.unreadable:
            logger.warning("job %s could not be read and is left out: %s", own_id, problem)
        self.records.pop(own_id, None)
        self.queue.pop(own_id, None)
        self.unreadable[own_id] = time.monotonic()

    def _to_retry(self) -> list[str]:
        due = time.monotonic() - UNREADABLE_S
        return [own_id for own_id, tried_at in self.unreadable.items() if tried_at < due]

    def _look_for_changes(self) -> bool:
        """Asks a Slurm without the short list for changes; a large answer is not asked for as often."""
        now = time.monotonic()
        if now - self.listed_at < SHARE_OF_CHANGES * self.took_s:
            return False
        clock = self.rest.clock()  # before the list: what changes in between is told twice
        found = self.rest.jobs(since=None if self.clock is None else self.clock - 1)
        self.clock = clock
        if found is not None:
            self.take(found, is_all=True)
            self.listed_at, self.took_s = time.monotonic(), time.monotonic() - now
        return True


def _waits(record: Record) -> bool:
    return record.status.state == "pending"
