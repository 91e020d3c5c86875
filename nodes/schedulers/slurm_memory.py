"""What slurmctld last said of its jobs, so that it need not be asked for all of them again."""

from __future__ import annotations

import time
from collections.abc import Set
from dataclasses import dataclass, field, replace

from nodes.schedulers.base import ENDED, JobStatus
from nodes.schedulers.cluster import QueuedJob
from nodes.schedulers.slurm_rest import JobList
from nodes.schedulers.slurm_shapes import Record


@dataclass
class Memory:
    """What slurmctld last said of its jobs: by their own ids, with the words that /jobs/state had for them then."""

    records: dict[str, Record] = field(default_factory=dict)
    queue: dict[str, QueuedJob] = field(default_factory=dict)
    words: dict[str, tuple[str, ...]] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)  # "<array>_<task>" → own id
    ended: dict[str, JobStatus] = field(default_factory=dict)  # by the id that was asked for
    listed_at: float = float("-inf")  # monotonic: when all of them were last read
    took_s: float = 0.0
    asked_at: float = float("-inf")
    before: dict[tuple[str, int], str] = field(default_factory=dict)  # (id, restart count) → why the run before ended
    wondered: dict[tuple[str, int], float] = field(default_factory=dict)  # since when we wait to be told
    clock: float | None = None  # Slurm's, when it last told everything
    told: dict[str, tuple[float, JobStatus | None]] = field(default_factory=dict)  # of accounts, without an end; when
    away_until: float = float("-inf")  # the accounts
    default_partition: str = ""
    waiting: frozenset[str] | None = None  # tasks of arrays, where Slurm lists them one by one
    cancelled: set[str] = field(default_factory=set)  # by us, of waiting tasks: Slurm forgets these without a word

    def take(self, found: JobList, *, is_all: bool) -> None:
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
        self.ended = {known: status for known, status in self.ended.items() if known in wanted}
        self.told = {known: told for known, told in self.told.items() if known in wanted}
        self.cancelled &= wanted
        self.before = {place: word for place, word in self.before.items() if place[0] in wanted}
        long_ago = time.monotonic() - 3600
        self.wondered = {place: since for place, since in self.wondered.items() if since > long_ago}

    def find(self, scheduler_id: str) -> Record | None:
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
