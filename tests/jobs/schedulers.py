"""A scheduler that reports what a test wants, and records the calls it receives."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from nodes.schedulers.base import Capabilities, JobStatus, Listing, NodeStatus, SchedulerError, SlurmStep, Submission
from nodes.schedulers.cluster import AccountsInfo, LicenseInfo, PartitionInfo, QueuedJobInfo, ReservationInfo
from nodes.schedulers.local.capabilities import CAPABILITIES as LOCAL

DGX_01 = NodeStatus(name="dgx-01", state="idle", cpus=8, gpus=4, memory_mib=65_536, gpu_type="h100", plays_many=True)


@dataclass
class ScriptedScheduler:
    """Implements Scheduler. `update_job(id, …)` changes what the next poll reads; `broken` makes every call fail."""

    jobs: dict[str, JobStatus] = field(default_factory=dict)
    submissions: list[Submission] = field(default_factory=list)
    signals: list[tuple[str, str]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    broken: SchedulerError | None = None
    refuses_submissions: SchedulerError | None = None
    loses_answers: bool = False  # accepts a submission, but its answer is lost
    meanwhile: Callable[[], object] | None = None  # called once, while the next status is on its way
    machines: list[NodeStatus] = field(default_factory=lambda: [DGX_01])
    queued: list[QueuedJobInfo] = field(default_factory=list)
    divided: list[PartitionInfo] = field(default_factory=list)
    reserved: list[ReservationInfo] = field(default_factory=list)
    licensed: list[LicenseInfo] = field(default_factory=list)
    accounted: AccountsInfo = field(default_factory=AccountsInfo)
    broken_parts: dict[str, SchedulerError] = field(default_factory=dict)  # by method: "queue", "accounts", "drain" …
    unreadable: dict[str, int] = field(default_factory=dict)  # by part: records of "nodes", "queue" left out
    requests: list[str] = field(default_factory=list)  # the methods that were called
    drained: dict[str, str] = field(default_factory=dict)
    stepped: dict[tuple[str, int], tuple[SlurmStep, ...]] = field(default_factory=dict)  # by id and restart count
    cancellers: dict[str, str] = field(default_factory=dict)  # by id
    released: list[tuple[str, str]] = field(default_factory=list)  # id, in whose name
    has_arrays: bool = False
    arrays: list[tuple[Submission, list[int], int | None]] = field(default_factory=list)
    calls: int = 0
    behind_s: float | None = None  # how far its clock is behind ours; None: it reports no time
    refuses: Callable[[str, str], SchedulerError | None] | None = None  # (what, scheduler id) that signal, cancel raise

    @property
    def capabilities(self) -> Capabilities:
        return replace(LOCAL, has_arrays=self.has_arrays)

    def update_job(self, scheduler_id: str, **changes: object) -> None:
        self.jobs[scheduler_id] = replace(self.jobs[scheduler_id], **changes)  # type: ignore[arg-type]

    def submit(self, submission: Submission) -> str:
        self._answer()
        if self.refuses_submissions is not None:
            raise self.refuses_submissions
        self.submissions.append(submission)
        scheduler_id = str(100 + len(self.submissions))
        self.jobs[scheduler_id] = JobStatus(scheduler_id=scheduler_id, state="pending", key=submission.key)
        if self.loses_answers:
            raise SchedulerError("no answer within 10 s")
        return scheduler_id

    def submit_array(self, submission: Submission, tasks: Sequence[int], *, at_once: int | None) -> list[str]:
        self._answer()
        if self.refuses_submissions is not None:
            raise self.refuses_submissions
        self.arrays.append((submission, list(tasks), at_once))
        ids = [f"{500 + len(self.arrays)}_{task}" for task in tasks]
        for scheduler_id in ids:
            self.jobs[scheduler_id] = JobStatus(scheduler_id=scheduler_id, state="pending", key=submission.key)
        if self.loses_answers:
            raise SchedulerError("no answer within 10 s")
        return ids

    def find(self, key: str, *, user: str = "", task: int | None = None) -> str | None:
        self._answer()
        found = (job.scheduler_id for job in self.jobs.values() if job.key == key)
        if task is not None:
            return next((scheduler_id for scheduler_id in found if scheduler_id.endswith(f"_{task}")), None)
        return next((scheduler_id.partition("_")[0] for scheduler_id in found), None)

    def status(self, scheduler_ids: list[str]) -> dict[str, JobStatus]:
        self._answer()
        if self.meanwhile is not None:
            happens, self.meanwhile = self.meanwhile, None
            happens()
        return {scheduler_id: self.jobs[scheduler_id] for scheduler_id in scheduler_ids if scheduler_id in self.jobs}

    def steps(self, scheduler_id: str, restart_count: int = 0) -> tuple[SlurmStep, ...]:
        self._part("steps")
        return self.stepped.get((scheduler_id, restart_count), ())

    def release(self, scheduler_id: str, *, user: str = "") -> None:
        self._part("release")
        self.released.append((scheduler_id, user))

    def cancelled_by(self, scheduler_id: str, restart_count: int = 0) -> str:
        self._part("cancelled_by")
        return self.cancellers.get(scheduler_id, "")

    def signal(self, scheduler_id: str, name: str, *, user: str = "") -> None:
        self._answer()
        self._refuse("signal", scheduler_id)
        self.signals.append((scheduler_id, name))

    def cancel(self, scheduler_id: str, *, user: str = "") -> None:
        self._answer()
        self._refuse("cancel", scheduler_id)
        self.cancelled.append(scheduler_id)

    def nodes(self) -> Listing[NodeStatus]:
        self._part("nodes")
        return Listing(self.machines, unreadable=self.unreadable.get("nodes", 0))

    def queue(self) -> Listing[QueuedJobInfo]:
        self._part("queue")
        return Listing(self.queued, unreadable=self.unreadable.get("queue", 0))

    def partitions(self) -> Listing[PartitionInfo]:
        self._part("partitions")
        return Listing(self.divided)

    def reservations(self) -> Listing[ReservationInfo]:
        self._part("reservations")
        return Listing(self.reserved)

    def licenses(self) -> Listing[LicenseInfo]:
        self._part("licenses")
        return Listing(self.licensed, unreadable=self.unreadable.get("licenses", 0))

    def clock(self) -> float | None:
        self._part("clock")
        return None if self.behind_s is None else time.time() - self.behind_s

    def accounts(self) -> AccountsInfo:
        self._part("accounts")
        return self.accounted

    def drain(self, node: str, reason: str) -> None:
        self._part("drain")
        self._drained(node, "drained", reason)
        self.drained[node] = reason

    def undrain(self, node: str) -> None:
        self._part("undrain")
        self._drained(node, "idle", "")
        self.drained.pop(node, None)

    def reserve(self, name: str, nodes: Sequence[str], *, seconds: int) -> None:
        self._part("reserve")
        if all(reservation.name != name for reservation in self.reserved):
            self.reserved.append(ReservationInfo(name=name, nodes=tuple(nodes)))

    def unreserve(self, name: str) -> None:
        self._part("unreserve")
        self.reserved = [reservation for reservation in self.reserved if reservation.name != name]

    def reserve_window(self, name: str, nodes: Sequence[str], *, starts_at: float, ends_at: float) -> None:
        self._part("reserve_window")
        if all(reservation.name != name for reservation in self.reserved):
            self.reserved.append(ReservationInfo(name=name, nodes=tuple(nodes), starts_at=starts_at, ends_at=ends_at))

    def _drained(self, node: str, state: str, reason: str) -> None:
        if node not in {machine.name for machine in self.machines}:
            raise SchedulerError(f"There is no node {node}.", permanent=True)
        self.machines = [replace(m, state=state, reason=reason) if m.name == node else m for m in self.machines]

    def _part(self, name: str) -> None:
        self._answer()
        self.requests.append(name)
        if name in self.broken_parts:
            raise self.broken_parts[name]

    def _refuse(self, what: str, scheduler_id: str) -> None:
        if self.refuses is not None and (error := self.refuses(what, scheduler_id)) is not None:
            raise error

    def _answer(self) -> None:
        self.calls += 1
        if self.broken is not None:
            raise self.broken
