"""Slurm, followed through slurmrestd with as few calls as it can be.

`status` keeps what it was told. Where Slurm has a short list of states (REST v0.0.40) it asks for that, then for the
jobs that changed; elsewhere for everything, but only if something has changed. What slurmctld has forgotten the
accounts are asked about. The queue comes from the same memory: nobody else asks Slurm about jobs.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from nodes.schedulers.base import ENDED, UNKNOWN, JobStatus, NodeStatus, SchedulerError, SlurmStep, Submission
from nodes.schedulers.cluster import Accounts, Partition, QueuedJob, Reservation
from nodes.schedulers.slurm_request import NEW, lacks_nodes
from nodes.schedulers.slurm_rest import JobList, Run, SlurmRest
from nodes.schedulers.slurm_shapes import Record
from nodes.schedulers.slurm_tokens import Tokens

logger = logging.getLogger(__name__)

SINGLY = 20  # changed jobs that are asked for one by one; more of them together
ACCOUNTS_AT_ONCE = 20
FIND_BACK_S = 2 * 86_400
FRESH_S = 15.0  # reasons, priorities and estimates of waiting jobs
SHARE = 20  # a full list is asked for again only after this many times what it took
ACCOUNTS_LAG_S = 8.0
AGAIN_S = 10.0  # until the accounts are asked again about a job whose end they do not tell
AWAY_S = 5.0  # for so long they are left alone after they did not answer: each question may take a time-out
HELD = "JobHeldUser"
GAP_S = 10.0  # after which a job may have been requeued and started again unseen
_SIGNALS = frozenset({"TERM", "USR1", "KILL"})
_NODE = re.compile(r"[A-Za-z0-9_.-]{1,255}\Z")


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
        self.before = {place: word for place, word in self.before.items() if place[0] in wanted}
        long_ago = time.monotonic() - 3600
        self.wondered = {place: since for place, since in self.wondered.items() if since > long_ago}

    def find(self, scheduler_id: str) -> Record | None:
        own_id = self.places.get(scheduler_id, scheduler_id)
        if (known := self.records.get(own_id)) is not None and known.has(scheduler_id):
            return known
        array = self.records.get(scheduler_id.partition("_")[0])
        return array if array is not None and array.has(scheduler_id) else None


class Slurm:
    """Implements Scheduler. One at a time may follow: what it remembers is its own."""

    def __init__(self, rest: SlurmRest, *, tokens: Tokens, user: str, scontrol: str = "scontrol") -> None:
        self.rest, self.tokens, self.user, self.scontrol = rest, tokens, user, scontrol
        self._memory = Memory()

    def submit(self, submission: Submission) -> str:
        if not submission.user:  # never as the portal's own: that one may read what no job may
            raise SchedulerError(
                "Whose job it is has no Slurm user any more. A sysadmin sets it under People in the administration.",
                permanent=True,
            )
        try:
            script = Path(submission.script).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SchedulerError(f"The batch script cannot be read: {error}") from error
        scheduler_id = self.rest.submit(submission, script)
        if lacks_nodes(submission, self.rest.version):
            self._name_nodes(scheduler_id, submission)
        return scheduler_id

    def find(self, key: str, *, user: str = "") -> str | None:
        """In slurmctld, which keeps ended jobs for some minutes, then in the accounts of the last days.

        Only this person's: anybody may read a key in the queue, and write it into the name of a job of their own.
        """
        whose = user or self.user
        listed = self.rest.jobs(user=user)
        known = _newest(listed.records() if listed is not None else (), key, whose)
        if known is None and self.rest.has_accounts:
            since = time.time() - FIND_BACK_S
            known = _newest(self.rest.accounted(user=whose, since=since), key, whose)
        if known is not None and known.reason == HELD and self.rest.version < NEW:
            self.cancel(known.scheduler_id, user=user)  # it may lack its nodes: see _name_nodes
            return None
        return None if known is None else known.scheduler_id

    def status(self, scheduler_ids: list[str]) -> dict[str, JobStatus]:
        memory = self._memory
        memory.keep_only(set(scheduler_ids))
        if not scheduler_ids:
            return {}
        has_looked = self._look()
        answer, forgotten = {}, []
        for scheduler_id in scheduler_ids:
            record = memory.find(scheduler_id)
            if record is not None:
                answer[scheduler_id] = replace(record.status, scheduler_id=scheduler_id)
            elif scheduler_id in memory.ended:
                answer[scheduler_id] = memory.ended[scheduler_id]
            elif has_looked:
                forgotten.append(scheduler_id)
            else:
                answer[scheduler_id] = JobStatus(scheduler_id=scheduler_id, state=UNKNOWN)
        answer |= self._from_accounts(forgotten)
        memory.asked_at = time.monotonic()
        return {known: self._with_before(status) for known, status in answer.items()}

    def steps(self, scheduler_id: str, restart_count: int = 0) -> tuple[SlurmStep, ...]:
        """The exit codes and signals of a run's steps, from the accounts; none while these have none."""
        for run in self.rest.runs(scheduler_id.partition("_")[0]) if self.rest.has_accounts else ():
            if run.record.has(scheduler_id) and run.record.status.restart_count == restart_count:
                return run.steps
        return ()

    def signal(self, scheduler_id: str, name: str, *, user: str = "") -> None:
        if name not in _SIGNALS:
            raise SchedulerError(f"{name} is not a signal that jobs are sent.", permanent=True)
        self.rest.signal(scheduler_id, name, user=user or self.user)

    def cancel(self, scheduler_id: str, *, user: str = "") -> None:
        self.rest.cancel(scheduler_id, user=user or self.user)

    def nodes(self) -> list[NodeStatus]:
        return self.rest.nodes()

    def queue(self) -> list[QueuedJob]:
        memory = self._memory
        age = time.monotonic() - memory.listed_at
        if age > max(FRESH_S, SHARE * memory.took_s):
            self._list_all()
        return list(memory.queue.values())

    def partitions(self) -> list[Partition]:
        """Since v0.0.40 Slurm does not say which is the default: its jobs do, of those that named none."""
        found = self.rest.partitions()
        known = found[0].name if len(found) == 1 else self._memory.default_partition
        if any(one.is_default for one in found):
            return found
        return [replace(one, is_default=one.name == known) for one in found]

    def reservations(self) -> list[Reservation]:
        return self.rest.reservations()

    def accounts(self) -> Accounts:
        return self.rest.accounts() if self.rest.has_accounts else Accounts()

    def drain(self, node: str, reason: str) -> None:
        self._set_node(node, "DRAIN", reason)

    def undrain(self, node: str) -> None:
        self._set_node(node, "RESUME", "")

    def _look(self) -> bool:
        """Bring the memory in step with slurmctld; whether it was asked at all."""
        if self.rest.tells_states:
            self._look_at_states()
            return True
        return self._look_for_changes()

    def _look_at_states(self) -> None:
        memory, states = self._memory, self.rest.states()
        was_away = time.monotonic() - memory.asked_at > GAP_S
        said = {_own_id(listed): words for listed, words in states.items()}
        for own_id in [known for known in memory.records if known not in said]:
            memory.forget(own_id)
        changed = [own_id for own_id, words in said.items() if was_away or memory.words.get(own_id) != words]
        if len(changed) > SINGLY:
            self._list_all()
        else:
            for own_id in changed:
                memory.take(self.rest.details(own_id), is_all=False)
        memory.words = said

    def _look_for_changes(self) -> bool:
        """Of a Slurm without the short list; a large answer is not asked for as often."""
        memory, now = self._memory, time.monotonic()
        if now - memory.listed_at < 4 * memory.took_s:
            return False
        clock = self.rest.clock()  # before the list: what changes in between is told twice
        found = self.rest.jobs(since=None if memory.clock is None else memory.clock - 1)
        memory.clock = clock
        if found is not None:
            memory.take(found, is_all=True)
            memory.listed_at, memory.took_s = time.monotonic(), time.monotonic() - now
        return True

    def _list_all(self) -> None:
        memory, began = self._memory, time.monotonic()
        found = self.rest.jobs()
        if found is not None:
            memory.take(found, is_all=True)
            memory.listed_at = time.monotonic()
            memory.took_s = memory.listed_at - began

    def _from_accounts(self, scheduler_ids: list[str]) -> dict[str, JobStatus]:
        """Those that slurmctld has forgotten. What cannot be asked now is UNKNOWN, what accounts lack is left out."""
        if not self.rest.has_accounts:
            return {}
        memory, now = self._memory, time.monotonic()
        never = (float("-inf"), None)
        due = [known for known in scheduler_ids if now - memory.told.get(known, never)[0] > AGAIN_S]
        due.sort(key=lambda known: memory.told.get(known, never)[0])  # so that none waits for others without end
        for scheduler_id in due[:ACCOUNTS_AT_ONCE]:
            try:
                found = self._accounted(scheduler_id)
            except SchedulerError as error:
                logger.warning("job %s: the accounts do not answer: %s", scheduler_id, error)
                break
            if found is not None and found.state in ENDED:
                memory.ended[scheduler_id] = found
            else:
                memory.told[scheduler_id] = now, found
        answer = {}
        for scheduler_id in scheduler_ids:
            unknown = JobStatus(scheduler_id=scheduler_id, state=UNKNOWN)
            told = memory.ended.get(scheduler_id) or memory.told.get(scheduler_id, (now, unknown))[1]
            if told is not None:
                answer[scheduler_id] = told
        return answer

    def _accounted(self, scheduler_id: str) -> JobStatus | None:
        runs = [run.record.status for run in self._runs(scheduler_id) if run.record.has(scheduler_id)]
        if not runs:
            return None
        last = runs[-1]
        if last.state not in ENDED:  # slurmctld does not know it, the accounts have not heard of its end: not yet told
            return JobStatus(scheduler_id=scheduler_id, state=UNKNOWN, key=last.key)
        return replace(last, scheduler_id=scheduler_id, before=_before(runs, last.restart_count) or "")

    def _runs(self, scheduler_id: str) -> list[Run]:
        memory = self._memory
        if time.monotonic() < memory.away_until:
            raise SchedulerError("The accounts (slurmdbd) did not answer just now; they are asked again soon.")
        try:
            return self.rest.runs(scheduler_id.partition("_")[0])
        except SchedulerError:
            memory.away_until = time.monotonic() + AWAY_S
            raise

    def _with_before(self, status: JobStatus) -> JobStatus:
        """With the end of the run before a restart. UNKNOWN until the accounts have heard of it."""
        if not status.restart_count or status.before or status.state == UNKNOWN or not self.rest.has_accounts:
            return status
        memory, place = self._memory, (status.scheduler_id, status.restart_count)
        if place not in memory.before:
            since = memory.wondered.setdefault(place, time.monotonic())
            word = self._ask_before(status)
            if word is None and time.monotonic() - since < ACCOUNTS_LAG_S:
                return replace(status, state=UNKNOWN)
            memory.before[place] = word or ""
            memory.wondered.pop(place, None)
        return replace(status, before=memory.before[place])

    def _ask_before(self, status: JobStatus) -> str | None:
        """A word of ENDED, "" for a plain requeue, None where the accounts do not tell yet."""
        try:
            runs = self._runs(status.scheduler_id)
        except SchedulerError:
            return None
        told = [run.record.status for run in runs if run.record.has(status.scheduler_id)]
        return _before(told, status.restart_count)

    def _name_nodes(self, scheduler_id: str, asked: Submission) -> None:
        """Of a job that was submitted on hold, as REST v0.0.38 has no words for nodes; then let it go."""
        wanted = [f"reqnodelist={','.join(asked.required_nodes)}"] if asked.required_nodes else []
        unwanted = [f"excnodelist={','.join(asked.excluded_nodes)}"] if asked.excluded_nodes else []
        try:
            self._call_scontrol("update", f"jobid={scheduler_id}", *wanted, *unwanted, user=asked.user)
            self._call_scontrol("release", scheduler_id, user=asked.user)
        except SchedulerError as error:
            self.cancel(scheduler_id, user=asked.user)
            raise SchedulerError(f"It could not be told which nodes to use. {error}", permanent=True) from error

    def _set_node(self, node: str, state: str, reason: str) -> None:
        if not _NODE.match(node):
            raise SchedulerError(f"{node!r} is not the name of a node.", permanent=True)
        if self.rest.updates_nodes:
            self.rest.update_node(node, state=state, reason=reason)
        else:
            why = [f"reason={reason}"] if reason else []
            self._call_scontrol("update", f"nodename={node}", f"state={state}", *why, user=self.user)

    def _call_scontrol(self, *words: str, user: str) -> None:
        """What an old slurmrestd cannot do, in a user's name by token."""
        command = shutil.which(self.scontrol)
        if command is None:
            message = "This Slurm changes nodes by scontrol only, which is not installed beside Vigil's worker."
            raise SchedulerError(
                f"{message} Install Slurm's client commands there, or use Slurm 23.11.", permanent=True
            )
        kept = {name: value for name, value in os.environ.items() if name in {"PATH", "SLURM_CONF", "LANG"}}
        environment = {**kept, "SLURM_JWT": self.tokens.of(user)}
        try:
            done = subprocess.run(
                [command, *words], env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                errors="replace", timeout=10, check=False,
            )  # fmt: skip
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            raise SchedulerError(f"scontrol did not answer: {error}") from None
        if done.returncode:
            raise SchedulerError(f"scontrol: {done.stderr.strip() or done.stdout.strip()}", permanent=True)


def _own_id(listed: str) -> str:
    """Of "17" and of "17_3", in which Slurm writes either the array's id or, once it runs, the task's own."""
    return listed.partition("_")[0]


def _newest(records: Iterable[Record], key: str, user: str) -> JobStatus | None:
    """Of a person's jobs with this key the one that lives, else the last one."""
    ours = [record.status for record in records if record.status.key == key and record.status.is_of(user)]
    return max(ours, key=lambda one: (one.state not in ENDED, one.submitted_at or 0.0), default=None)


def _before(runs: list[JobStatus], restart_count: int) -> str | None:
    """Why the run before this one ended: a word of ENDED, "" for a plain requeue, None where that is not told yet."""
    earlier = [run for run in runs if run.restart_count == restart_count - 1]
    return earlier[-1].before if earlier and earlier[-1].ended_at else None
