"""Slurm, followed through slurmrestd with as few calls as it can be.

`status` keeps what slurmctld last said (job_cache); about what that has forgotten the accounts are asked
(accounting). The queue comes from the same cache: nobody else asks Slurm about jobs.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from nodes.schedulers.base import ENDED, UNKNOWN, JobStatus, Listing, NodeStatus, SchedulerError, SlurmStep, Submission
from nodes.schedulers.cluster import Accounts, License, Partition, QueuedJob, Reservation
from nodes.schedulers.slurm.accounting import PastJobs
from nodes.schedulers.slurm.commands import Commands
from nodes.schedulers.slurm.job_cache import JobCache
from nodes.schedulers.slurm.request import array_of, lacks_nodes
from nodes.schedulers.slurm.rest import Run, SlurmRest
from nodes.schedulers.slurm.shapes import Record
from nodes.schedulers.slurm.tokens import Tokens
from nodes.schedulers.slurm.versions import BY_TASK, NODES_BY_NAME, RELEASES

logger = logging.getLogger(__name__)

FIND_BACK_S = 2 * 86_400
FRESH_S = 15.0  # reasons, priorities and estimates of waiting jobs
SHARE = 20  # a full list is asked for again only after this many times what it took
HELD = "JobHeldUser"
_SIGNALS = frozenset({"TERM", "USR1", "KILL"})
NO_SUCH_ARRAY = 2081  # ESLURM_INVALID_ARRAY
GONE = ("Invalid job id", "already completed", "already completing")
_TASK = re.compile(r"[0-9]{1,10}_[0-9]{1,9}\Z", re.ASCII)
_JOB = re.compile(r"[0-9]{1,10}(?:_[0-9]{1,9})?\Z", re.ASCII)
_NODE = re.compile(r"[A-Za-z0-9_.-]{1,255}\Z")


class Slurm:
    """Implements Scheduler. One at a time may follow: what it remembers is its own."""

    has_arrays = True

    def __init__(self, rest: SlurmRest, *, tokens: Tokens, user: str, scontrol: str = "scontrol") -> None:
        self.rest, self.user = rest, user
        self.commands = Commands(tokens, scontrol)
        self._cache = JobCache(rest)
        self._past = PastJobs(rest)

    def submit(self, submission: Submission) -> str:
        return self._submit(submission)

    def submit_array(self, submission: Submission, tasks: Sequence[int], *, at_once: int | None) -> list[str]:
        try:
            array = self._submit(submission, array_of(tasks, at_once))
        except SchedulerError as error:
            if error.number != NO_SUCH_ARRAY:
                raise
            message = f"Slurm takes no array of {max(tasks) + 1:,} jobs: its MaxArraySize is less. Take fewer values,"
            raise SchedulerError(
                f"{message} or ask for a larger MaxArraySize.", permanent=True, number=error.number
            ) from None
        return [f"{array}_{task}" for task in tasks]

    def _submit(self, submission: Submission, array: str = "") -> str:
        if not submission.user:  # never as the portal's own: that one may read what no job may
            raise SchedulerError(
                "Whose job it is has no Slurm user any more. A sysadmin sets it under People in the administration.",
                permanent=True,
            )
        try:
            script = Path(submission.script).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SchedulerError(f"The batch script cannot be read: {error}") from error
        scheduler_id = self.rest.submit(submission, script, array=array)
        if lacks_nodes(submission, self.rest.version):
            self._name_nodes(scheduler_id, submission)
        return scheduler_id

    def find(self, key: str, *, user: str = "", task: int | None = None) -> str | None:
        """Looks in slurmctld, which keeps ended jobs for some minutes, then in the accounts of the last days.

        Only this person's: anybody may read a key in the queue, and write it into the name of a job of their own.
        """
        whose = user or self.user
        listed = self.rest.jobs(user=user)
        known = _newest(listed.records() if listed is not None else (), key, whose, task)
        if known is None and self.rest.has_accounts:
            since = time.time() - FIND_BACK_S
            known = _newest(self.rest.accounted(user=whose, since=since), key, whose, task)
        if known is None:
            return None
        found = known.scheduler_id.partition("_")[0]
        if known.reason == HELD and self.rest.version < NODES_BY_NAME:
            self.cancel(found, user=user)  # it may lack its nodes: see _name_nodes
            return None
        return found if task is None else f"{found}_{task}"

    def status(self, scheduler_ids: list[str]) -> dict[str, JobStatus]:
        cache, past = self._cache, self._past
        cache.keep_only(set(scheduler_ids))
        past.keep_only(set(scheduler_ids))
        if not scheduler_ids:
            return {}
        if has_looked := cache.look():
            cache.look_at_waiting(scheduler_ids)
        answer, forgotten = {}, []
        for scheduler_id in scheduler_ids:
            record = cache.find(scheduler_id)
            if record is not None:
                answer[scheduler_id] = replace(record.status, scheduler_id=scheduler_id)
            elif (ended := past.ended.get(scheduler_id)) is not None:
                answer[scheduler_id] = ended
            elif has_looked:
                forgotten.append(scheduler_id)
            else:
                answer[scheduler_id] = JobStatus(scheduler_id=scheduler_id, state=UNKNOWN)
        answer |= past.tell(forgotten)
        for scheduler_id in forgotten:
            if scheduler_id in answer:
                continue
            if (fate := cache.fate(scheduler_id)) is not None:
                answer[scheduler_id] = fate
            elif cache.may_be_unread(scheduler_id):
                answer[scheduler_id] = JobStatus(scheduler_id=scheduler_id, state=UNKNOWN)
        cache.asked_at = time.monotonic()
        return {known: past.with_before(status) for known, status in answer.items()}

    def steps(self, scheduler_id: str, restart_count: int = 0) -> tuple[SlurmStep, ...]:
        """The exit codes and signals of a run's steps, from the accounts; none while these have none."""
        run = self._accounted_run(scheduler_id, restart_count)
        return run.steps if run else ()

    def cancelled_by(self, scheduler_id: str, restart_count: int = 0) -> str:
        run = self._accounted_run(scheduler_id, restart_count)
        return run.record.cancelled_by if run else ""

    def _accounted_run(self, scheduler_id: str, restart_count: int) -> Run | None:
        for run in self.rest.runs(scheduler_id.partition("_")[0]) if self.rest.has_accounts else ():
            if run.record.has(scheduler_id) and run.record.status.restart_count == restart_count:
                return run
        return None

    def signal(self, scheduler_id: str, name: str, *, user: str = "") -> None:
        if name not in _SIGNALS:
            raise SchedulerError(f"{name} is not a signal that jobs are sent.", permanent=True)
        if known := self._known_to_rest(scheduler_id):
            self.rest.signal(known, name, user=user or self.user)
        else:
            self._scancel(scheduler_id, f"--signal={name}", "--batch", user=user)

    def release(self, scheduler_id: str, *, user: str = "") -> None:
        if self.rest.version >= RELEASES:
            self.rest.release(scheduler_id, user=user or self.user)
            return
        if not _JOB.match(scheduler_id):
            raise SchedulerError(f"{scheduler_id!r} is not the id of a Slurm job.", permanent=True)
        self.commands.call("scontrol", "release", scheduler_id, user=user or self.user, why="This Slurm releases jobs")

    def cancel(self, scheduler_id: str, *, user: str = "") -> None:
        if known := self._known_to_rest(scheduler_id):
            self.rest.cancel(known, user=user or self.user)
        else:
            self._scancel(scheduler_id, user=user)
        if "_" in scheduler_id:
            self._cache.cancelled.add(scheduler_id)

    def _known_to_rest(self, scheduler_id: str) -> str:
        """What slurmrestd knows it by, if anything: an old one takes "17_3" for 17, and 17 for the whole array."""
        return "" if "_" in scheduler_id and self.rest.version < BY_TASK else scheduler_id

    def _scancel(self, scheduler_id: str, *options: str, user: str) -> None:
        if not _TASK.match(scheduler_id):
            raise SchedulerError(f"{scheduler_id!r} is not the id of a Slurm job.", permanent=True)
        why = "This Slurm cancels a job of an array by itself"
        try:
            self.commands.call("scancel", *options, scheduler_id, user=user or self.user, why=why)
        except SchedulerError as error:
            if not any(word in str(error) for word in GONE):
                raise

    def nodes(self) -> Listing[NodeStatus]:
        return self.rest.nodes()

    def queue(self) -> Listing[QueuedJob]:
        cache = self._cache
        age = time.monotonic() - cache.listed_at
        if age > max(FRESH_S, SHARE * cache.took_s):
            cache.list_all()
        return Listing(cache.queue.values(), unreadable=cache.unreadable_jobs)

    def partitions(self) -> Listing[Partition]:
        """All partitions. Since v0.0.40 REST names no default: jobs that named none tell it, or scontrol does."""
        found = self.rest.partitions()
        if any(one.is_default for one in found):
            return found
        known = found[0].name if len(found) == 1 else self._cache.default_partition or self._default_partition()
        marked = (replace(one, is_default=one.name == known) for one in found)
        return Listing(marked, unreadable=found.unreadable)

    def reservations(self) -> Listing[Reservation]:
        return self.rest.reservations()

    def licenses(self) -> Listing[License]:
        return self.rest.licenses()

    def clock(self) -> float | None:
        return self.rest.clock()

    def accounts(self) -> Accounts:
        return self.rest.accounts() if self.rest.has_accounts else Accounts()

    def drain(self, node: str, reason: str) -> None:
        self._set_node(node, "DRAIN", reason)

    def undrain(self, node: str) -> None:
        self._set_node(node, "RESUME", "")

    def _default_partition(self) -> str:
        """The default partition as scontrol tells it; "" where it does not, or is not installed beside the worker."""
        why = "This Slurm tells its default partition"
        try:
            told = self.commands.call("scontrol", "show", "partition", "--oneliner", user=self.user, why=why)
        except SchedulerError as error:
            logger.debug("the default partition is not known: %s", error)
            return ""
        return next((line.split()[0].partition("=")[2] for line in told.splitlines() if " Default=YES " in line), "")

    def _name_nodes(self, scheduler_id: str, asked: Submission) -> None:
        """Tells a job that was submitted on hold its nodes, for which REST v0.0.38 has no words; then lets it go."""
        wanted = [f"reqnodelist={','.join(asked.required_nodes)}"] if asked.required_nodes else []
        unwanted = [f"excnodelist={','.join(asked.excluded_nodes)}"] if asked.excluded_nodes else []
        try:
            why = "This Slurm is told which nodes to use"
            self.commands.call(
                "scontrol", "update", f"jobid={scheduler_id}", *wanted, *unwanted, user=asked.user, why=why
            )
            self.commands.call("scontrol", "release", scheduler_id, user=asked.user, why=why)
        except SchedulerError as error:
            self.cancel(scheduler_id, user=asked.user)
            raise SchedulerError(f"It could not be told which nodes to use. {error}", permanent=True) from error

    def _set_node(self, node: str, state: str, reason: str) -> None:
        if not _NODE.match(node):
            raise SchedulerError(f"{node!r} is not the name of a node.", permanent=True)
        if self.rest.updates_nodes:
            self.rest.update_node(node, state=state, reason=reason)
        else:
            given = [f"nodename={node}", f"state={state}", *([f"reason={reason}"] if reason else [])]
            self.commands.call("scontrol", "update", *given, user=self.user, why="This Slurm changes nodes")


def _newest(records: Iterable[Record], key: str, user: str, task: int | None) -> JobStatus | None:
    """Finds among a person's jobs with this key (and this task of an array) the one that lives, else the last one."""
    wanted = (record for record in records if key in record.status.keys and _has_task(record, task))
    ours = [record.status for record in wanted if record.status.is_of(user)]
    return max(ours, key=lambda one: (not one.other_key, one.state not in ENDED, one.submitted_at or 0.0), default=None)


def _has_task(record: Record, task: int | None) -> bool:
    return task is None or record.has(f"{record.status.scheduler_id.partition('_')[0]}_{task}")
