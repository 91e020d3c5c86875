"""What slurmctld last said of its jobs, kept in step with it by as few calls as it takes.

Where Slurm has a short list of states (REST v0.0.40) that is asked for, then the jobs that changed; elsewhere all of
them, but only if something has changed.
"""

from __future__ import annotations

import time
from collections.abc import Set
from dataclasses import dataclass, field, replace

from nodes.schedulers.base import ENDED, JobStatus
from nodes.schedulers.cluster import QueuedJob
from nodes.schedulers.slurm_rest import JobList, SlurmRest
from nodes.schedulers.slurm_shapes import Record

SINGLY = 20  # changed jobs that are asked for one by one; more of them together
GAP_S = 10.0  # after which a job may have been requeued and started again unseen
SHARE_OF_CHANGES = 4  # a list of changes is asked for again only after this many times what it took


@dataclass
class Memory:
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
    cancelled: set[str] = field(default_factory=set)  # by us, of waiting tasks: Slurm forgets these without a word

    def look(self) -> bool:
        """Bring the memory in step with slurmctld; whether it was asked at all."""
        if self.rest.tells_states:
            self._look_at_states()
            return True
        return self._look_for_changes()

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
        if is_all:
            self.records.clear()
            self.queue.clear()
            self.places.clear()
        self.default_partition = found.default_partition() or self.default_partition
        for record, job in found.both():
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
        for kept in (self.records, self.queue, self.words):
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

    def fate(self, scheduler_id: str) -> JobStatus | None:
        """Of a task that never had a record of its own: cancelled by us, or with what was left of its array."""
        array = self.records.get(scheduler_id.partition("_")[0])
        if array is not None and array.is_array and array.status.state in ENDED and "_" in scheduler_id:
            return replace(array.status, scheduler_id=scheduler_id)
        if scheduler_id in self.cancelled:
            return JobStatus(scheduler_id=scheduler_id, state="cancelled")
        return None

    def _look_at_states(self) -> None:
        """By the short list, then job by job, or all together where many have changed."""
        states = self.rest.states()
        was_away = time.monotonic() - self.asked_at > GAP_S
        said = {_own_id(listed): words for listed, words in states.items()}
        for own_id in [known for known in self.records if known not in said]:
            self.forget(own_id)
        changed = [own_id for own_id, words in said.items() if was_away or self.words.get(own_id) != words]
        if len(changed) > SINGLY:
            self.list_all()
        else:
            for own_id in changed:
                self.take(self.rest.details(own_id), is_all=False)
        self.words = said
        self.waiting = frozenset(states)

    def _look_for_changes(self) -> bool:
        """Of a Slurm without the short list; a large answer is not asked for as often."""
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


def _own_id(listed: str) -> str:
    """Of "17" and of "17_3", in which Slurm writes either the array's id or, once it runs, the task's own."""
    return listed.partition("_")[0]
