"""Drive Slurm through slurmrestd with as few requests as possible.

`status` caches slurmctld's jobs (job_cache) and queries accounting for those that slurmctld has forgotten. The queue
comes from the same cache: nothing else asks Slurm about jobs.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from nodes.schedulers.base import ENDED, UNKNOWN, JobStatus, Listing, NodeStatus, SchedulerError, SlurmStep, Submission
from nodes.schedulers.cluster import AccountsInfo, LicenseInfo, PartitionInfo, QueuedJobInfo, ReservationInfo
from nodes.schedulers.slurm.accounting import PastJobs
from nodes.schedulers.slurm.capabilities import CAPABILITIES
from nodes.schedulers.slurm.commands import SlurmCommands
from nodes.schedulers.slurm.job_cache import JobCache
from nodes.schedulers.slurm.request import array_expression, needs_node_update
from nodes.schedulers.slurm.rest import AccountedRun, SlurmRest
from nodes.schedulers.slurm.rights import with_remedy
from nodes.schedulers.slurm.shapes import JobRecord
from nodes.schedulers.slurm.tokens import TokenSource
from nodes.schedulers.slurm.versions import CANCEL_BY_TASK, NODES_BY_NAME, RELEASE_BY_UPDATE

logger = logging.getLogger(__name__)

FIND_WITHIN_S = 2 * 86_400  # how far back accounting is searched for a key
FRESH_S = 15.0  # maximum age of pending jobs' reasons, priorities and estimates
LIST_INTERVAL_FACTOR = 20  # minimum time between full lists, as a multiple of what one took
USER_HOLD = "JobHeldUser"
_SIGNALS = frozenset({"TERM", "USR1", "KILL"})
NO_SUCH_ARRAY = 2081  # ESLURM_INVALID_ARRAY
ALREADY_GONE = ("Invalid job id", "already completed", "already completing")
_TASK = re.compile(r"[0-9]{1,10}_[0-9]{1,9}\Z", re.ASCII)
_JOB = re.compile(r"[0-9]{1,10}(?:_[0-9]{1,9})?\Z", re.ASCII)
_NODE = re.compile(r"[A-Za-z0-9_.-]{1,255}\Z")


class Slurm:
    """Implement nodes.schedulers.base.Scheduler with Slurm. Its cache serves one follower at a time."""

    capabilities = CAPABILITIES

    def __init__(self, rest: SlurmRest, *, tokens: TokenSource, user: str, scontrol: str = "scontrol") -> None:
        self.rest, self.user = rest, user
        self.commands = SlurmCommands(tokens, scontrol)
        self._cache = JobCache(rest)
        self._past = PastJobs(rest)

    def submit(self, submission: Submission) -> str:
        return self._submit(submission)

    def submit_array(self, submission: Submission, tasks: Sequence[int], *, at_once: int | None) -> list[str]:
        try:
            array = self._submit(submission, array_expression(tasks, at_once))
        except SchedulerError as error:
            if error.number != NO_SUCH_ARRAY:
                raise
            message = f"Slurm accepts no array of {max(tasks) + 1:,} jobs: its MaxArraySize is less. Use fewer values,"
            raise SchedulerError(
                f"{message} or ask for a larger MaxArraySize.", permanent=True, number=error.number
            ) from None
        return [f"{array}_{task}" for task in tasks]

    def _submit(self, submission: Submission, array: str = "") -> str:
        if not submission.user:  # never as the portal's user, who can read what no job may
            raise SchedulerError(
                "The job's owner has no Slurm user any more. A sysadmin can set it under People in the administration.",
                permanent=True,
            )
        try:
            script = Path(submission.script).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SchedulerError(f"The batch script cannot be read: {error}") from error
        scheduler_id = self.rest.submit(submission, script, array=array)
        if needs_node_update(submission, self.rest.version):
            self._set_job_nodes(scheduler_id, submission)
        return scheduler_id

    def find(self, key: str, *, user: str = "", task: int | None = None) -> str | None:
        """Search slurmctld, which keeps ended jobs for some minutes, then accounting of the last days.

        Only this user's jobs count: anybody can read a key in the queue and put it into the name of their own job.
        """
        owner = user or self.user
        listed = self.rest.jobs(user=user)
        status = _newest(listed.records() if listed is not None else (), key, owner, task)
        if status is None and self.rest.has_accounting:
            since = time.time() - FIND_WITHIN_S
            status = _newest(self.rest.accounted(user=owner, since=since), key, owner, task)
        if status is None:
            return None
        job_id = status.scheduler_id.partition("_")[0]
        if status.reason == USER_HOLD and self.rest.version < NODES_BY_NAME:
            self.cancel(job_id, user=user)  # it may lack its nodes: see _set_job_nodes
            return None
        return job_id if task is None else f"{job_id}_{task}"

    def status(self, scheduler_ids: list[str]) -> dict[str, JobStatus]:
        cache, past = self._cache, self._past
        cache.keep_only(set(scheduler_ids))
        past.keep_only(set(scheduler_ids))
        if not scheduler_ids:
            return {}
        if is_refreshed := cache.refresh():
            cache.refresh_pending(scheduler_ids)
        statuses, forgotten = {}, []
        for scheduler_id in scheduler_ids:
            record = cache.find(scheduler_id)
            if record is not None:
                statuses[scheduler_id] = replace(record.status, scheduler_id=scheduler_id)
            elif (ended := past.ended.get(scheduler_id)) is not None:
                statuses[scheduler_id] = ended
            elif is_refreshed:
                forgotten.append(scheduler_id)
            else:
                statuses[scheduler_id] = JobStatus(scheduler_id=scheduler_id, state=UNKNOWN)
        statuses |= past.statuses(forgotten)
        for scheduler_id in forgotten:
            if scheduler_id in statuses:
                continue
            if (inferred := cache.inferred_end(scheduler_id)) is not None:
                statuses[scheduler_id] = inferred
            elif cache.may_be_unread(scheduler_id):
                statuses[scheduler_id] = JobStatus(scheduler_id=scheduler_id, state=UNKNOWN)
        cache.last_query_at = time.monotonic()
        return {scheduler_id: past.with_previous_run(status) for scheduler_id, status in statuses.items()}

    def steps(self, scheduler_id: str, restart_count: int = 0) -> tuple[SlurmStep, ...]:
        """Return the exit codes and signals of a run's steps from accounting; empty while it has none."""
        run = self._accounted_run(scheduler_id, restart_count)
        return run.steps if run else ()

    def cancelled_by(self, scheduler_id: str, restart_count: int = 0) -> str:
        run = self._accounted_run(scheduler_id, restart_count)
        return run.record.cancelled_by if run else ""

    def _accounted_run(self, scheduler_id: str, restart_count: int) -> AccountedRun | None:
        for run in self.rest.runs(scheduler_id.partition("_")[0]) if self.rest.has_accounting else ():
            if run.record.has(scheduler_id) and run.record.status.restart_count == restart_count:
                return run
        return None

    def signal(self, scheduler_id: str, name: str, *, user: str = "") -> None:
        if name not in _SIGNALS:
            raise SchedulerError(f"{name} cannot be sent to jobs. Use TERM, USR1 or KILL.", permanent=True)
        if rest_id := self._rest_id(scheduler_id):
            self.rest.signal(rest_id, name, user=user or self.user)
        else:
            self._scancel(scheduler_id, f"--signal={name}", "--batch", user=user)

    def release(self, scheduler_id: str, *, user: str = "") -> None:
        if self.rest.version >= RELEASE_BY_UPDATE:
            self.rest.release(scheduler_id, user=user or self.user)
            return
        if not _JOB.match(scheduler_id):
            raise SchedulerError(f"{scheduler_id!r} is not the id of a Slurm job.", permanent=True)
        self.commands.call(
            "scontrol", "release", scheduler_id, user=user or self.user, why="This Slurm can release jobs"
        )

    def cancel(self, scheduler_id: str, *, user: str = "") -> None:
        if rest_id := self._rest_id(scheduler_id):
            self.rest.cancel(rest_id, user=user or self.user)
        else:
            self._scancel(scheduler_id, user=user)
        if "_" in scheduler_id:
            self._cache.cancelled.add(scheduler_id)

    def _rest_id(self, scheduler_id: str) -> str:
        """Return the id for slurmrestd; "" if it has none.

        An old one takes "17_3" for 17, and 17 for the whole array.
        """
        return "" if "_" in scheduler_id and self.rest.version < CANCEL_BY_TASK else scheduler_id

    def _scancel(self, scheduler_id: str, *options: str, user: str) -> None:
        if not _TASK.match(scheduler_id):
            raise SchedulerError(f"{scheduler_id!r} is not the id of a Slurm job.", permanent=True)
        why = "This Slurm can cancel a single array task"
        try:
            self.commands.call("scancel", *options, scheduler_id, user=user or self.user, why=why)
        except SchedulerError as error:
            if not any(word in str(error) for word in ALREADY_GONE):
                raise

    def nodes(self) -> Listing[NodeStatus]:
        return self.rest.nodes()

    def queue(self) -> Listing[QueuedJobInfo]:
        cache = self._cache
        age = time.monotonic() - cache.listed_at
        if age > max(FRESH_S, LIST_INTERVAL_FACTOR * cache.took_s):
            cache.list_all()
        return Listing(cache.queue.values(), unreadable=cache.unreadable_jobs)

    def partitions(self) -> Listing[PartitionInfo]:
        """Return all partitions.

        Since v0.0.40 REST marks no default: it is found from jobs that named no partition, or with scontrol.
        """
        found = self.rest.partitions()
        if any(partition.is_default for partition in found):
            return found
        default = found[0].name if len(found) == 1 else self._cache.default_partition or self._default_partition()
        marked = (replace(partition, is_default=partition.name == default) for partition in found)
        return Listing(marked, unreadable=found.unreadable)

    def reservations(self) -> Listing[ReservationInfo]:
        return self.rest.reservations()

    def licenses(self) -> Listing[LicenseInfo]:
        return self.rest.licenses()

    def clock(self) -> float | None:
        return self.rest.clock()

    def accounts(self) -> AccountsInfo:
        return self.rest.accounts() if self.rest.has_accounting else AccountsInfo()

    def drain(self, node: str, reason: str) -> None:
        self._set_node(node, "DRAIN", reason)

    def undrain(self, node: str) -> None:
        self._set_node(node, "RESUME", "")

    def reserve(self, name: str, nodes: Sequence[str], *, seconds: int) -> None:
        """Reserve with scontrol: up to v0.0.42, REST only reads reservations."""
        if wrong := next((node for node in (name, *nodes) if not _NODE.match(node)), None):
            raise SchedulerError(f"{wrong!r} is not the name of a node or reservation.", permanent=True)
        if any(reservation.name == name for reservation in self.rest.reservations()):
            return
        self._reserve(
            "create", "reservation", f"reservationname={name}", f"nodes={','.join(nodes)}", f"users={self.user}",
            "starttime=now", f"duration={math.ceil(seconds / 60)}", "flags=maint,ignore_jobs",
        )  # fmt: skip

    def unreserve(self, name: str) -> None:
        if not _NODE.match(name):
            raise SchedulerError(f"{name!r} is not the name of a reservation.", permanent=True)
        if all(reservation.name != name for reservation in self.rest.reservations()):
            return
        self._reserve("delete", f"reservationname={name}")

    def reserve_window(self, name: str, nodes: Sequence[str], *, starts_at: float, ends_at: float) -> None:
        """Reserve with scontrol: up to v0.0.42, REST only reads reservations.

        Running jobs do not matter (ignore_jobs); times are relative, as the worker's time zone may differ from Slurm's.
        """
        if wrong := next((node for node in (name, *nodes) if not _NODE.match(node)), None):
            raise SchedulerError(f"{wrong!r} is not the name of a node or reservation.", permanent=True)
        if any(reservation.name == name for reservation in self.rest.reservations()):
            return
        ahead_s, now = max(0, math.ceil(starts_at - time.time())), time.time()
        minutes = max(1, math.ceil((ends_at - max(starts_at, now)) / 60))
        self._reserve(
            "create", "reservation", f"reservationname={name}", f"nodes={','.join(nodes)}", f"users={self.user}",
            f"starttime=now+{ahead_s}seconds" if ahead_s else "starttime=now", f"duration={minutes}",
            "flags=maint,ignore_jobs",
        )  # fmt: skip

    def _reserve(self, *words: str) -> None:
        """Create or remove a reservation with scontrol."""
        try:
            self.commands.call("scontrol", *words, user=self.user, why="Slurm reserves nodes", otherwise="")
        except SchedulerError as error:
            raise with_remedy(error, self.user, "reserve nodes") from error

    def _default_partition(self) -> str:
        """Return the default partition from scontrol; "" if it fails or is not installed with the worker."""
        why = "This Slurm reports its default partition"
        try:
            output = self.commands.call("scontrol", "show", "partition", "--oneliner", user=self.user, why=why)
        except SchedulerError as error:
            logger.debug("the default partition is unknown: %s", error)
            return ""
        return next((line.split()[0].partition("=")[2] for line in output.splitlines() if " Default=YES " in line), "")

    def _set_job_nodes(self, scheduler_id: str, submission: Submission) -> None:
        """Set the nodes of a job submitted on hold, which REST v0.0.38 cannot express, then release it."""
        wanted = [f"reqnodelist={','.join(submission.required_nodes)}"] if submission.required_nodes else []
        unwanted = [f"excnodelist={','.join(submission.excluded_nodes)}"] if submission.excluded_nodes else []
        try:
            why = "This Slurm can set a job's nodes"
            self.commands.call(
                "scontrol", "update", f"jobid={scheduler_id}", *wanted, *unwanted, user=submission.user, why=why
            )
            self.commands.call("scontrol", "release", scheduler_id, user=submission.user, why=why)
        except SchedulerError as error:
            self.cancel(scheduler_id, user=submission.user)
            raise SchedulerError(f"The job's nodes could not be set. {error}", permanent=True) from error

    def _set_node(self, node: str, state: str, reason: str) -> None:
        if not _NODE.match(node):
            raise SchedulerError(f"{node!r} is not the name of a node.", permanent=True)
        try:
            if self.rest.can_update_nodes:
                self.rest.update_node(node, state=state, reason=reason)
            else:
                settings = [f"nodename={node}", f"state={state}", *([f"reason={reason}"] if reason else [])]
                self.commands.call("scontrol", "update", *settings, user=self.user, why="This Slurm can change nodes")
        except SchedulerError as error:
            raise with_remedy(error, self.user, "change nodes") from error


def _newest(records: Iterable[JobRecord], key: str, user: str, task: int | None) -> JobStatus | None:
    """Return a user's job with this key (and array task): the live one, else the last one; None if there is none."""
    wanted = (record for record in records if key in record.status.keys and _has_task(record, task))
    ours = [record.status for record in wanted if record.status.may_belong_to(user)]
    return max(
        ours,
        key=lambda status: (not status.other_key, status.state not in ENDED, status.submitted_at or 0.0),
        default=None,
    )


def _has_task(record: JobRecord, task: int | None) -> bool:
    return task is None or record.has(f"{record.status.scheduler_id.partition('_')[0]}_{task}")
